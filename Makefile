# `make demo` and `make test` are all one needs: each sets up what it uses. `make help` lists more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is made of what is imported, then: of everything it takes longer than fetching it. It is
# kept whatever the environment says, or each of the tests' many processes would make it anew.
export PYTHONDONTWRITEBYTECODE :=
PIP := .ci/install $(BIN)/python -c constraints.txt
# HASHES=1, as in continuous integration: what is installed has to be the files whose hashes .ci/hashes
# has noted, for Python 3.11 on Linux x86-64. torch is another build for each kind of machine.
HASHES ?=
HASHED := .ci/install $(BIN)/python --no-deps --no-build-isolation --require-hashes
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
CMAKE_FLAGS := -G Ninja -DSKBUILD_PROJECT_VERSION=$(VERSION) -DDPT_BUILD_PYTHON=OFF \
               -DDPT_BUILD_TESTS=ON -DDPT_WERROR=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
               -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1
NATIVE := $(shell find csrc -type f) CMakeLists.txt
FORMATTED := $(shell find csrc tests deepytorch_core -name '*.[ch]pp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PYTEST_FLAGS ?=
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
# For instance --config-settings cmake.define.DPT_CUDA=OFF: without GPU kernels (.ci/wheel).
WHEEL_FLAGS ?=
ADAPTERS ?= all
# Of the GPU kernels where nvcc is found; a wheel has them for more (csrc/CMakeLists.txt). Without a
# GPU it is enough to see that they compile: optimizing and machine code take most of the time.
HAS_GPU := $(wildcard /dev/nvidiactl)
CUDA_ARCHITECTURES ?= $(if $(HAS_GPU),90a-real,90a-virtual)
CUDA_FLAGS ?= $(if $(HAS_GPU),,-Xcicc=-O0)
DPT_CUDA := ON
TARGETS := _core;dpt_nccl_tuner
export PYTHON
# What wheel and native tests are made of is compiled once, in one folder.
NATIVE_SETTINGS = build-dir=build/native cmake.define.DPT_CUDA=$(DPT_CUDA) \
                   cmake.define.CMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES) \
                   cmake.define.CMAKE_CUDA_FLAGS=$(CUDA_FLAGS)

# The virtual environment's tools (cmake, ninja, compilers' helpers) come first, also for children.
export PATH := $(CURDIR)/$(BIN):$(PATH)

# A folder of the environment, and what is installed into it.
into = $(if $(HASHES),$(HASHED) --upgrade --target $(VENV)/$(1) -r .ci/requirements/$(1).txt,\
  $(PIP) --no-deps --upgrade --target $(VENV)/$(1) $(2))

.NOTPARALLEL:  # the steps use both cores themselves, and pytest's last line comes last
.PHONY: help venv adapter demo test setup check lint build-core build-native test-native test-python test-extended test-network test-tensorflow \
        test-hangs test-faults test-frameworks soak fuzz docs test-docs test-pictures wheel test-matrix test-sdist \
        sanitize format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

venv: $(VENV)/.project ## .venv with everything: PyTorch, the tools, this project (editable)

$(VENV)/.tools: constraints.txt
	@.ci/system python compiler
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip --disable-pip-version-check install -q --no-deps $(if $(HASHES),\
	  --require-hashes -r .ci/requirements/uv.txt,-c constraints.txt uv)
	@$(if $(HASHES),$(HASHED) -r .ci/requirements/tools.txt,\
	  $(PIP) scikit-build-core pybind11 cmake ninja setuptools wheel)
	@touch $@

$(VENV)/.dependencies: $(VENV)/.tools pyproject.toml constraints.txt
	@# On its own, so that nothing else pulls in a second, larger build of it.
	@$(PIP) $(if $(HASHES),--no-deps) torch
	@# The project's own dependencies, without building it: that is the next step.
	@$(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  e = p['optional-dependencies']; [e.pop(x) for x in ('all', 'examples', 'fp8')]; \
	  print(*p['dependencies'], *sum(e.values(), []), sep='\n')" > $(VENV)/requirements.txt
	@# DeepSpeed's own build asks for the torch that is there, so it can't be isolated.
	@$(if $(HASHES),DS_BUILD_OPS=0 $(HASHED) -r .ci/requirements/venv.txt)
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation -r $(VENV)/requirements.txt
	@# Apart: packaged for CUDA it breaks whoever imports it beside a torch without (transformers).
	@$(call into,vision,torchvision timm)
	@# Apart: peft and diffusers import it wherever it is, a second in every process.
	@$(call into,fp8,torchao)
	@# Apart: they ask for an older torch, and accelerate and transformers import what is there.
	@$(call into,trainers,pytorch-ignite mosaicml torchmetrics lightning-utilities torch-optimizer \
	  pytorch-ranger coolname tabulate py-cpuinfo importlib-metadata zipp)
	@touch $@

# An editable install knows the files that were there, so a folder that changed installs again.
FOLDERS := $(shell find deepytorch deepytorch_core integrations recipes -type d -not -name __pycache__ 2>/dev/null)
$(VENV)/.project: $(VENV)/.dependencies $(NATIVE) $(FOLDERS)
	@echo "Building the native core ..."
	@# Another package, or an environment's older one, would own the same files.
	@$(BIN)/pip uninstall -q -y deepytorch 2> /dev/null || true
	@# Not its short name -C, which the pip of Python 3.11's early releases lacks.
	@$(BIN)/pip --disable-pip-version-check install -q --no-compile --no-build-isolation --no-deps -e . $(addprefix --config-settings ,$(NATIVE_SETTINGS)) \
	  --config-settings "build.targets=$(TARGETS)"
	@touch $@

# DeepSpeed compiles this in the first process that needs it. In a test it would be in the test's
# time, and when that kills the process, torch's lock stays and all later ones wait for it.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/build/torch_extensions
OPERATORS := $(TORCH_EXTENSIONS_DIR)/.made
$(OPERATORS): $(VENV)/.dependencies
	@echo "Building DeepSpeed's operator for CPUs ..."
	@rm -rf $(@D) && mkdir -p $(@D)
	@# Its build looks for ninja on the path. Where that or another of its dependencies is missing it
	@# is DeepSpeed's affair: ours is built all the same.
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python \
	  -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()" > $(@D)/log 2>&1 && touch $@ \
	  || echo "DeepSpeed's operator is left out: $$(tail -n 1 $(@D)/log) (all of it: $(@D)/log)"

adapter: venv ## compile the c10d adapter for the installed PyTorch, unless it is cached
	@$(BIN)/deepytorch build

# Without a GPU, its kernels would only take a third of the compiler's time.
demo: DPT_CUDA := $(if $(HAS_GPU),ON,OFF)
demo: $(VENV)/.tools ## train a small Llama with the stock stack and with ours, and compare
	$(call beside_packages,build-core)
	@$(MAKE) --no-print-directory venv DPT_CUDA=$(DPT_CUDA)
	@$(BIN)/deepytorch train llama_sft --compare --nproc-per-node 2

test: setup check test-python ## lint, native tests and all Python tests

# Fetching and unpacking packages keeps one core busy, the compiler the other.
define beside_packages
@mkdir -p build
@$(MAKE) --no-print-directory $(1) DPT_CUDA=$(DPT_CUDA) > build/native.log 2>&1 & native=$$!; \
  $(MAKE) --no-print-directory $(VENV)/.dependencies; status=$$?; \
  wait $$native || { cat build/native.log; exit 1; }; exit $$status
endef

setup: $(VENV)/.tools
	$(call beside_packages,build-native)
	@$(MAKE) --no-print-directory venv

# The linters keep one core busy, the compiler of what the tests need the other, the native tests both.
check: venv
	@mkdir -p build
	@$(MAKE) --no-print-directory adapter $(OPERATORS) test-native > build/check.log 2>&1 & check=$$!; \
	  $(MAKE) --no-print-directory lint; status=$$?; \
	  wait $$check || status=1; cat build/check.log; exit $$status

lint: venv ## ruff, mypy --strict, clang-format, how prose begins: check only
	$(BIN)/python .ci/prose.py check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# As installed: integrations/ and recipes/ live inside the facade.
	@rm -rf build/typed && mkdir -p build/typed/deepytorch
	@ln -s $(CURDIR)/deepytorch_core build/typed/
	@ln -s $(CURDIR)/deepytorch/* $(wildcard $(CURDIR)/integrations $(CURDIR)/recipes) build/typed/deepytorch/
	@ln -s $(CURDIR)/tests/tools/* build/typed/
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
	  --cache-dir $(CURDIR)/.mypy_cache
	@$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

# By what pip calls, so that pip finds all of it made.
build_editable = $(BIN)/python -c "import sys; from scikit_build_core.build import build_editable; \
  build_editable('build/editable', dict(each.split('=', 1) for each in sys.argv[1:]))" \
  $(NATIVE_SETTINGS)

build-core: $(VENV)/.tools
	@$(build_editable) "build.targets=$(TARGETS)"

build-native: $(VENV)/.tools
	@.ci/system gtest
	@$(build_editable) cmake.define.DPT_BUILD_TESTS=ON cmake.define.DPT_WERROR=ON

test-native: build-native ## GoogleTest of the torch-free core: ranks are threads
	@# No more than cores: ranks and emulated devices that wait take processor time first.
	$(BIN)/ctest --test-dir build/native --output-on-failure --parallel $(shell nproc)

# What the processes that tests start read first.
STARTUP := PYTHONPATH=$(CURDIR)/tests/startup OMP_NUM_THREADS=1

# Most tests wait for processes of their own: two sessions at a time keep the cores busy. They take
# as long as each other; that beside the first must do without Ctrl-C, which shells keep from it.
BESIDE := tests/integrations tests/recipes tests/scripts tests/network tests/faults tests/docs \
          tests/multiproc/test_padding_free_training.py tests/multiproc/test_run_compare.py \
          tests/multiproc/test_compile_zero3.py tests/multiproc/test_kernels_sharded.py \
          tests/multiproc/test_compile.py tests/unit/test_compile_hostile.py \
          tests/unit/test_deepspeed_flag.py \
          $(wildcard tests/unit/test_padding*.py)
test-python: venv adapter $(OPERATORS) ## pytest: unit, several processes, conformance, recipes, adapters
	@.ci/system spin
	@mkdir -p build
	@export $(STARTUP); pytest="$(BIN)/pytest $(PYTEST_FLAGS) -m 'not extended'"; \
	  eval "$$pytest $(BESIDE)" > build/beside.log 2>&1 & beside=$$!; \
	  eval "$$pytest $(addprefix --ignore=,$(BESIDE))"; status=$$?; \
	  wait $$beside || status=1; cat build/beside.log; exit $$status

test-extended: venv adapter $(OPERATORS) ## tests that make test leaves out because a sibling shows the same (some minutes)
	$(STARTUP) $(BIN)/pytest $(PYTEST_FLAGS) -m extended

test-network: venv adapter $(OPERATORS) ## jobs over emulated nodes: fails where it may make no network namespaces (needs root)
	@$(BIN)/python -c "import sys; from deepytorch_core.testing import emulation; \
	  sys.exit(emulation.missing_privilege())"
	$(STARTUP) $(BIN)/pytest $(PYTEST_FLAGS) tests/network

test-tensorflow: ## Horovod's API for TensorFlow, in an environment without torch (build/tensorflow)
	@.ci/system python compiler
	$(PYTHON) -m venv build/tensorflow
	build/tensorflow/bin/pip install -q tensorflow-cpu==2.21.0 pytest pytest-timeout packaging \
	  typing_extensions scikit-build-core pybind11 cmake ninja
	PATH=$(CURDIR)/build/tensorflow/bin:$$PATH \
	  build/tensorflow/bin/pip install -q --no-build-isolation --no-deps .
	build/tensorflow/bin/pytest --noconftest tests/integrations/check_horovod_tensorflow.py

COUNT ?= 100
test-hangs: venv adapter ## plants COUNT hangs in scripts, ours and others', and counts the right verdicts: 15 s for each
	$(BIN)/python tests/faults/hangs.py --count $(COUNT) --json build/hangs.jsonl

# A group of pyproject.toml's: what only one target needs.
$(VENV)/.group-%: $(VENV)/.project pyproject.toml constraints.txt
	@$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb')) \
	  ['dependency-groups']['$*'], sep='\n')" > $(VENV)/$*.txt
	@$(if $(HASHES),$(HASHED) -r .ci/requirements/$*.txt)
	@$(PIP) -r $(VENV)/$*.txt
	@touch $@

# Of an environment of its own: the site needs neither torch nor the native core.
DOCS := build/docs-tools
$(DOCS)/.group-docs: pyproject.toml constraints.txt
	@.ci/system python
	@$(PYTHON) -m venv --clear $(DOCS)
	@$(DOCS)/bin/pip --disable-pip-version-check install -q -c constraints.txt $$($(PYTHON) -c \
	  "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['docs'])")
	@touch $@

docs: $(DOCS)/.group-docs ## the documentation's site, in build/site; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "build/site/index.html; with search: $(DOCS)/bin/python -m http.server -b 127.0.0.1 -d build/site"

test-pictures: venv docs ## report, README's chart, home page, results and others look as expected (a minute)
	@.ci/system chromium
	$(BIN)/pytest $(PYTEST_FLAGS) tests/pictures/check_pictures.py

test-docs: venv adapter $(OPERATORS) $(VENV)/.group-notebooks $(VENV)/.group-platforms ## pages and notebooks do what they say (eight minutes)
	$(BIN)/pytest $(PYTEST_FLAGS) tests/docs/check_pages.py tests/docs/check_notebooks.py tests/docs/check_platforms.py

wheel: ## dist/: wheels with GPU kernels and adapters (PYTHONS=..., ADAPTERS=all|none|2.13.0 ...), sdist
	@.ci/system python compiler
	@PYTHONS="$(PYTHONS)" ADAPTERS="$(ADAPTERS)" .ci/wheel $(WHEEL_FLAGS)

# To bring the page up to date: make test-matrix MATRIX_PAGE=docs/results/matrix.md
test-matrix: ## these wheels in fresh environments, TORCHES x PYTHONS; downloads gigabytes
	@PYTHONS="$(PYTHONS)" PAGE="$(MATRIX_PAGE)" .ci/matrix $(TORCHES)

test-sdist: ## the sdist in dist/, installed in a fresh environment and tried, without GPU kernels
	@CMAKE_ARGS=-DDPT_CUDA=OFF .ci/fresh $(PYTHON) 2.13.0 build/sdist dist/deepytorch_train-$(VERSION).tar.gz \
	  python $(CURDIR)/tests/matrix/whole.py compiled

# Programs for tests that no wheel has.
TOOLS := PYTHONPATH=$(CURDIR)/tests/tools

# To bring the page up to date: make test-faults RECORD=docs/faults.jsonl PAGE=docs/faults.md
RECORD ?= build/faults.jsonl
PAGE ?= build/faults.md
test-faults: venv adapter ## every fault on every path in every phase, about ten minutes (docs/faults.md)
	@mkdir -p $(dir $(RECORD)) $(dir $(PAGE)) && rm -f $(RECORD)
	$(TOOLS) $(BIN)/python -m fault_matrix --json $(RECORD) --write $(PAGE) \
	  $(addprefix --beside ,$(wildcard docs/faults-*.jsonl))
	$(BIN)/pytest --timeout 400 tests/faults/check_restart.py tests/faults/check_elastic.py \
	  tests/faults/check_resize.py

test-frameworks: venv adapter $(OPERATORS) ## plants faults in jobs of every framework, 15 minutes (build/faults-frameworks.jsonl)
	$(BIN)/python tests/faults/frameworks.py --json build/faults-frameworks.jsonl

MINUTES ?= 30
soak: venv adapter ## random collectives with checked results for MINUTES=30, then 1000 cycles of groups (build/soak.jsonl)
	$(TOOLS) $(BIN)/python -m soak --minutes $(MINUTES) --json build/soak.jsonl

# libFuzzer for what reads bytes, one target after the other; hypothesis for what Python reads. All
# seven get the same share: SECONDS=4200 is ten minutes each. What came of it is added to a record,
# of which the page has the sum: make fuzz SECONDS=4200 FUZZ_RECORD=docs/faults-fuzz.jsonl
SECONDS ?= 600
FUZZ_RECORD ?= build/fuzz.jsonl
FUZZERS := json profile topology framing control handshake
fuzz: venv ## fuzz the wire format, the JSON files, options and YAML for SECONDS=600 altogether
	@.ci/system clang
	@CXX=clang++ $(BIN)/cmake -S . -B build/fuzz $(CMAKE_FLAGS) -DDPT_BUILD_TESTS=OFF -DDPT_CUDA=OFF \
	  -DDPT_WERROR=OFF -DDPT_BUILD_FUZZERS=ON -DDPT_SANITIZE=fuzzer-no-link,address,undefined > /dev/null
	@$(BIN)/cmake --build build/fuzz --target $(addprefix fuzz_,$(FUZZERS))
	@share=$$(( $(SECONDS) / $(words $(FUZZERS) python) + 1 )); \
	  $(TOOLS) $(BIN)/python -m fuzz_targets $(FUZZERS) --seconds $$share --json $(FUZZ_RECORD) && \
	  $(BIN)/pytest tests/fuzz --fuzz-seconds $$share --fuzz-record $(FUZZ_RECORD) --timeout 3600

sanitize: venv ## the native tests under AddressSanitizer + UBSan, then ThreadSanitizer
	@.ci/system gtest
	@for sanitizer in address,undefined thread; do \
	  $(BIN)/cmake -S . -B build/sanitize-$$sanitizer $(CMAKE_FLAGS) \
	    -DDPT_SANITIZE=$$sanitizer > /dev/null && \
	  $(BIN)/cmake --build build/sanitize-$$sanitizer && \
	  $(BIN)/ctest --test-dir build/sanitize-$$sanitizer --output-on-failure || exit 1; \
	done

format: venv ## rewrite Python and C++ in the project's format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

clean: ## remove what was built, also .venv
	rm -rf $(VENV) build dist
