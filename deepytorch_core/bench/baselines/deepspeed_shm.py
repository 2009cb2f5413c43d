"""DeepSpeed's all_reduce in shared memory for CPU inference, `inference_all_reduce_`.

Its op is compiled from the sources in the installed package the way DeepSpeed's own builder
(`ShareMemCommBuilder`) does, and called without the rest of DeepSpeed.

Each rank creates a block of 66 MiB in /dev/shm, named after MASTER_ADDR and MASTER_PORT, and leaves
it there; `prepare` removes them.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import secrets
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch_core import config
from deepytorch_core.bench.baselines import Bind, Call, Setup
from deepytorch_core.bench.job import BenchError

if TYPE_CHECKING:
    from deepytorch_core.bench.job import Job
    from deepytorch_core.bench.ops import Buffers, Operation

_PACKAGE = "deepspeed"
_MODULE = "deepspeed_shm_comm"
_SOURCES = ("shm_interface.cpp", "shm.cpp")
_FLAGS = ("-O2", "-fopenmp", "-UC10_USE_GLOG")
_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
_SHARED_MEMORY = Path("/dev/shm")
_RANK_BYTES = 66 << 20
_ADDRESS = "127.0.0.1"
# Instruction set that each type needs, as the op's vector_kernel_level() counts: AVX2, AVX-512.
_LEVELS = {"float32": (1, "AVX2"), "bfloat16": (2, "AVX-512"), "float16": (2, "AVX-512")}


@contextlib.contextmanager
def prepare(world_size: int) -> Iterator[Setup]:
    """Compiles the op and chooses the names of its shared memory, which is removed at the end."""
    folder = _package()
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < world_size * _RANK_BYTES:
        raise BenchError(
            f"--baseline deepspeed-shm puts {_RANK_BYTES >> 20} MiB per rank into "
            f"{_SHARED_MEMORY}, where {free >> 20} MiB are free: enlarge it, or take fewer ranks"
        )
    # The op only makes names of it: this run's own, beside any other of this user.
    token = secrets.token_hex(8)
    environment = {
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": token,
    }
    try:
        yield Setup(
            environment=environment,
            settings={"LOCAL_SIZE": str(world_size), "OpenMP threads per rank": "1"},
            versions={_PACKAGE: metadata.version(_PACKAGE)},
            library=_build(folder),
        )
    finally:
        prefix = f"deepspeed_allreduce_buffer_{os.getuid()}_{_ADDRESS}_{token}"
        for rank in range(world_size):
            (_SHARED_MEMORY / f"{prefix}_{rank}").unlink(missing_ok=True)


def connect(job: "Job", rank: int) -> Bind:
    """The op on this rank; the ranks meet in it."""
    import torch

    op = _import(job.library)
    level = op.vector_kernel_level()
    for dtype in job.dtypes:
        needed, name = _LEVELS[dtype]
        if level < needed:
            raise BenchError(
                f"DeepSpeed's shared-memory op needs a processor with {name} for {dtype}: "
                "leave that type out"
            )
    op.initialize(job.world_size, rank)

    def bind(_: "Operation", buffers: "Buffers") -> Call:
        return lambda: torch.ops.deepspeed.inference_all_reduce_(buffers.input)

    return bind


def _package() -> Path:
    """The installed package's folder, without importing it: that takes seconds."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise BenchError(
            "--baseline deepspeed-shm needs DeepSpeed: DS_BUILD_OPS=0 pip install deepspeed"
        )
    folder = Path(spec.origin).parent
    comm = folder / "ops" / "csrc" / "cpu" / "comm"
    if not all((comm / name).is_file() for name in _SOURCES):
        raise BenchError(
            f"DeepSpeed {metadata.version(_PACKAGE)} has no sources of its shared-memory op in "
            f"{comm}: pip install -U deepspeed"
        )
    return folder


def _build(folder: Path) -> str:
    """Compiles the op unless the cache has it (a minute or two, once); returns its path."""
    import torch

    cache = config.cache_dir() / f"baselines-{os.geteuid()}"
    version = metadata.version(_PACKAGE)
    target = cache / f"{_MODULE}-{version}-torch{torch.__version__}{_SUFFIX}"
    if target.is_file():
        return str(target)
    compiler = config.compiler()
    if compiler is None:
        raise BenchError(
            "--baseline deepspeed-shm compiles DeepSpeed's op, and there is no C++ compiler: "
            "install g++ or clang++, or name one in CXX"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Complete before it gets its name, so nobody loads a part of it.
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / target.name
            command = [*compiler, *_arguments(folder), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise BenchError(
                    f"DeepSpeed {version}'s shared-memory op does not compile with "
                    f"{shlex.join(compiler)}:\n{done.stderr.rstrip()}"
                )
            made.replace(target)
    except OSError as error:
        raise BenchError(
            f"{cache} can't be used ({error.strerror}): set DEEPYTORCH_CACHE_DIR to a folder of "
            "your own"
        ) from None
    return str(target)


def _arguments(folder: Path) -> list[str]:
    """DeepSpeed's flags and those that torch adds to an extension."""
    from torch.utils import cpp_extension

    root = folder / "ops" / "csrc" / "cpu"
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    return [
        *_FLAGS,
        *("-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={_MODULE}"),
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-I{root / 'includes'}",
        *(flag for path in includes for flag in ("-isystem", path)),
        *(str(root / "comm" / name) for name in _SOURCES),
        *(f"-L{path}" for path in cpp_extension.library_paths()),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]


def _import(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, path)
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
