"""The layer table of ARCHITECTURE.md, checked by reading every #include and every import."""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]

# csrc folder -> what else it may include: a folder (all its headers) or single headers. Every
# folder may include itself and the C ABI.
_LOWEST = {"base"}
_MIDDLE = {"base", "bootstrap", "topology", "host", "transport"}
CSRC_LAYERS: dict[str, set[str]] = {
    "include": set(),
    "base": set(),
    "bootstrap": _LOWEST,
    "topology": _LOWEST,
    "host": _LOWEST,
    "transport": _LOWEST | {"bootstrap"},
    "algorithms": _MIDDLE,
    "staged": _MIDDLE,
    "cuda": _MIDDLE | {"staged"},
    # choose() sees what an algorithm promises, never how it works.
    "tuner": _LOWEST
    | {"topology/topology.hpp", "algorithms/plan.hpp", "algorithms/algorithm.hpp"}
    | {"cuda/plan.hpp", "cuda/layout.hpp"},
    "comm": _MIDDLE | {"algorithms", "staged", "cuda", "tuner"},
    "c10d": set(),  # the adapter links nothing: it sees the core through the C ABI alone
    "bindings": _MIDDLE | {"algorithms", "cuda", "tuner", "comm"},
    "nccl_plugin": {"base", "tuner"},
}
C_ABI = "deepytorch.h"
OUTSIDE_HEADERS = {
    "torch": (re.compile(r"^(torch|ATen|c10|c10d|caffe2)/"), {"c10d"}),
    "pybind11": (re.compile(r"^pybind11/"), {"bindings", "c10d"}),
    "CUDA": (re.compile(r"^(cuda|cu|nv|nccl|cooperative_groups)\w*\.h$"), {"cuda"}),
}
NCCL_PLUGIN_HEADERS = re.compile(r"^nccl")

FRAMEWORKS = {
    "deepspeed",
    "megatron",
    "accelerate",
    "transformers",
    "diffusers",
    "horovod",
    "tensorflow",
}
# An adapter may import these of them: its own, and what that one is itself built on.
ADAPTER_FRAMEWORKS = {
    "transformers": {"transformers", "accelerate"},
    "horovod": set[str](),
    "horovod_tensorflow": {"tensorflow"},
}
# Packages below the adapters, for several of them, and what single modules of them import.
SHARED_BY_ADAPTERS = {"common", "kernels", "padding_free", "seams"}
SHARED_FRAMEWORKS = {
    "common/moved_batches": {"accelerate"},
    "padding_free/packed_attention": {"transformers"},
    "padding_free/packing_probe": {"transformers"},
    "seams/accumulated_batches": {"accelerate"},
    "seams/deepspeed_engine": {"deepspeed"},
    "seams/side_copies": {"accelerate"},
}
# Python layer -> our own layers that it may import besides itself.
PYTHON_LAYERS: dict[str, set[str]] = {
    "deepytorch_core": set(),
    "deepytorch": {"deepytorch_core"},
    "deepytorch.integrations": {"deepytorch_core", "deepytorch"},
    "deepytorch.recipes": {"deepytorch_core", "deepytorch", "deepytorch.integrations"},
    "deepytorch.workloads": {"deepytorch_core", "deepytorch", "deepytorch.integrations"},
    "deepytorch.cli": {
        "deepytorch_core",
        "deepytorch",
        "deepytorch.integrations",
        "deepytorch.workloads",
        "deepytorch.recipes",
    },
}
PYTHON_FOLDERS = {
    "deepytorch_core": "deepytorch_core",
    "deepytorch": "deepytorch",
    "integrations": "deepytorch.integrations",
    "recipes": "deepytorch.recipes",
}
CORE_ENVIRONMENT = "deepytorch_core/base/config.py"
# Tell the ranks they start who they are and where they meet; read nothing.
WRITES_ENVIRONMENT = {
    f"deepytorch_core/testing/{name}.py" for name in ("forked", "nursery", "script", "worker")
}


def include_violations(path: str, text: str) -> list[str]:
    """`path` is relative to the root: csrc/<layer>/..."""
    layer = PurePosixPath(path).parts[1]
    if layer not in CSRC_LAYERS:
        return [f"{path}: csrc/{layer} is not in the layer table of {Path(__file__).name}"]
    found = []
    for kind, header in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', text, re.MULTILINE):
        if kind == '"' and not _may_include(layer, header):
            found.append(f"{path}: csrc/{layer} may not include {header}")
        for name, (pattern, allowed) in OUTSIDE_HEADERS.items():
            if layer == "nccl_plugin" and NCCL_PLUGIN_HEADERS.match(header):
                continue
            if pattern.match(header) and layer not in allowed:
                found.append(f"{path}: {header}: {name} headers belong to {sorted(allowed)}")
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    reads = re.search(r"\b(secure_getenv|getenv|setenv|putenv|environ)\b", code)
    if reads and not path.startswith("csrc/base/env."):
        found.append(f"{path}: {reads.group(1)}: only csrc/base/env reads the environment")
    return found


def _may_include(layer: str, header: str) -> bool:
    folder, _, rest = header.partition("/")
    if header == C_ABI or not rest:  # no folder: the ABI, or a file beside it
        return True
    if any(pattern.match(header) for pattern, _ in OUTSIDE_HEADERS.values()):
        return True  # judged by that table
    return folder == layer or folder in CSRC_LAYERS[layer] or header in CSRC_LAYERS[layer]


def module_of(path: str) -> str:
    """Installed module name of a file of the tree."""
    folder, _, rest = path.partition("/")
    parts = [PYTHON_FOLDERS[folder], *PurePosixPath(rest).with_suffix("").parts]
    return ".".join(parts).removesuffix(".__init__")


def layer_of(module: str) -> str:
    return max((layer for layer in PYTHON_LAYERS if _within(module, layer)), key=len, default="")


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imported_modules(tree: ast.Module, module: str, *, is_package: bool) -> list[tuple[str, str]]:
    """(module, name) for every import, also by a constant string; name is "" for `import x`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                depth = node.level - 1 if is_package else node.level
                parent = module.split(".")[: len(module.split(".")) - depth]
                base = ".".join([*parent, *([node.module] if node.module else [])])
            found += [(base, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                found.append((node.args[0].value, ""))
    return found


def import_violations(path: str, text: str) -> list[str]:
    """`path` is relative to the root, in one of our packages."""
    tree = ast.parse(text, path)
    module = module_of(path)
    layer = layer_of(module)
    found = []
    for target, name in imported_modules(tree, module, is_package=path.endswith("__init__.py")):
        # `from package import module` names a module too.
        full = f"{target}.{name}" if name else target
        other = layer_of(full)
        if other and other != layer and other not in PYTHON_LAYERS[layer]:
            found.append(f"{path}: {layer} may not import {full}")
        if target.split(".")[0] == "tests":
            found.append(f"{path}: nothing imports tests ({full})")
        found += _framework_violation(path, layer, target)
        found += _adapter_violation(path, module, full)
        if layer == "deepytorch.recipes" and other and other != layer and _is_private(full):
            found.append(f"{path}: recipes use public names only, not {full}")
    return found + _environment_violations(path, tree)


def _framework_violation(path: str, layer: str, target: str) -> list[str]:
    framework = target.split(".")[0]
    if framework not in FRAMEWORKS:
        return []
    if layer == "deepytorch.integrations":
        adapter = PurePosixPath(path).parts[1].removesuffix(".py")
        allowed = ADAPTER_FRAMEWORKS.get(adapter, {adapter})
        if adapter in SHARED_BY_ADAPTERS:
            allowed = SHARED_FRAMEWORKS.get(path[len("integrations/") : -len(".py")], set())
        if framework in allowed:
            return []
        return [f"{path}: the adapter {adapter} may not import {framework}"]
    if layer in {"deepytorch_core", "deepytorch"}:
        return [f"{path}: {layer} is framework-free but imports {framework}"]
    return []


def _adapter_violation(path: str, module: str, full: str) -> list[str]:
    prefix = "deepytorch.integrations."
    if not (module.startswith(prefix) and full.startswith(prefix)):
        return []
    ours, theirs = (name.removeprefix(prefix).split(".")[0] for name in (module, full))
    if ours == theirs or theirs in SHARED_BY_ADAPTERS:
        return []
    if ours in SHARED_BY_ADAPTERS:
        return [f"{path}: what adapters share imports none of them ({full})"]
    return [f"{path}: adapters never import each other ({full})"]


def _is_private(full: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in full.split("."))


def _environment_violations(path: str, tree: ast.Module) -> list[str]:
    if path == CORE_ENVIRONMENT:
        return []
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [node.attr] if node.value.id in {"os", "posix"} else []
        elif isinstance(node, ast.ImportFrom) and node.module in {"os", "posix"}:
            names = [alias.name for alias in node.names]
        for name in {"environ", "environb", "getenv", "getenvb", "putenv"} & set(names):
            if path in WRITES_ENVIRONMENT and _is_written(tree, node):
                continue
            found.append(f"{path}:{node.lineno}: os.{name}: only {CORE_ENVIRONMENT} reads it")
    return found


def _is_written(tree: ast.Module, environ: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.value is environ
        and node.attr in {"update", "clear"}
        for node in ast.walk(tree)
    )


def _files(folder: str, suffixes: set[str]) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*"))
    return [file for file in files if file.suffix in suffixes]


def test_includes_follow_the_layers() -> None:
    files = _files("csrc", {".cpp", ".hpp", ".h", ".cu", ".cuh"})
    assert files
    found = []
    for file in files:
        found += include_violations(file.relative_to(ROOT).as_posix(), file.read_text())
    assert not found, "\n".join(found)


def test_imports_follow_the_layers() -> None:
    files = [file for folder in PYTHON_FOLDERS for file in _files(folder, {".py", ".pyi"})]
    assert files
    found = []
    for file in files:
        found += import_violations(file.relative_to(ROOT).as_posix(), file.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("csrc/base/log.cpp", '#include "comm/fabric.hpp"'),
        ("csrc/host/reduce.cpp", '#include "transport/transport.hpp"'),
        ("csrc/transport/shm/segment.cpp", '#include "algorithms/plan.hpp"'),
        ("csrc/tuner/choose.cpp", '#include "algorithms/steps.hpp"'),
        ("csrc/c10d/backend.cpp", '#include "comm/communicator.hpp"'),
        ("csrc/comm/fabric.cpp", "#include <torch/csrc/distributed/c10d/Store.hpp>"),
        ("csrc/comm/fabric.cpp", '  #  include "c10/util/Exception.h"'),
        ("csrc/comm/fabric.cpp", "#include <pybind11/pybind11.h>"),
        ("csrc/c10d/work.cpp", "#include <cuda_runtime_api.h>"),
        ("csrc/topology/nvml.cpp", "#include <nvml.h>"),
        ("csrc/comm/fabric.cpp", 'const char* v = std::getenv("X");'),
        ("csrc/stray/file.cpp", ""),
    ],
)
def test_a_wrong_include_is_found(path: str, text: str) -> None:
    assert include_violations(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("csrc/algorithms/table.cpp", '#include "transport/shm/segment.hpp"\n#include <vector>'),
        ("csrc/tuner/choose.cpp", '#include "algorithms/plan.hpp"\n#include "base/types.hpp"'),
        ("csrc/c10d/work.cpp", '#include "work.hpp"\n#include <c10/core/Event.h>'),
        ("csrc/base/env.cpp", '#include <cstdlib>\nauto v = std::getenv("X");'),
        ("csrc/host/reduce.cpp", "// getenv would be wrong here\n#include <cstdint>"),
    ],
)
def test_a_right_include_passes(path: str, text: str) -> None:
    assert not include_violations(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("deepytorch_core/c10d/adapter.py", "def f():\n    import deepspeed.comm"),
        ("deepytorch_core/c10d/adapter.py", "importlib.import_module('transformers')"),
        ("deepytorch_core/c10d/adapter.py", "from deepytorch.cli import main"),
        ("deepytorch_core/bench/job.py", "from ...deepytorch import integrations"),
        ("deepytorch/__init__.py", "from deepytorch.recipes import llama_sft"),
        ("deepytorch/__init__.py", "from . import integrations"),
        ("integrations/fsdp/__init__.py", "import accelerate"),
        ("integrations/accelerate/__init__.py", "from deepytorch.integrations.fsdp import hook"),
        ("integrations/accelerate/__init__.py", "from ..fsdp import hook"),
        ("integrations/common/contract.py", "import accelerate"),
        ("integrations/seams/plain.py", "from deepytorch.integrations.ddp import prepare_ddp"),
        ("integrations/ddp/__init__.py", "from deepytorch.recipes.data.text import pairs"),
        ("recipes/llama_sft.py", "from deepytorch_core.bench.launch import _free_port"),
        ("recipes/llama_sft.py", "from deepytorch_core import _core"),
        ("recipes/llama_sft.py", "from tests import conftest"),
        ("recipes/llama_sft.py", "import os\nrank = os.environ['RANK']"),
        ("deepytorch_core/report/summary.py", "from os import getenv"),
        ("deepytorch_core/testing/nursery.py", "import os\nos.environ['A']"),
    ],
)
def test_a_wrong_import_is_found(path: str, text: str) -> None:
    assert import_violations(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("deepytorch_core/base/config.py", "import os\nos.environ.get('DEEPYTORCH_LOG')"),
        ("deepytorch_core/bench/job.py", "from deepytorch_core import _core, config\nimport torch"),
        ("deepytorch_core/bench/job.py", "from . import timing\nfrom .. import config"),
        ("deepytorch/cli/train.py", "from deepytorch.recipes import llama_sft"),
        (
            "integrations/transformers/__init__.py",
            "import accelerate\nfrom ._contract import Handle",
        ),
        (
            "recipes/llama_sft.py",
            "from deepytorch.recipes.data import text as _data\nimport transformers",
        ),
        ("recipes/llama_sft.py", "import deepytorch\nfrom deepytorch.integrations import ddp"),
    ],
)
def test_a_right_import_passes(path: str, text: str) -> None:
    assert not import_violations(path, text)
