"""DeepSpeed's all_reduce in shared memory for CPU inference, `inference_all_reduce_`.

Its op is compiled from the sources in the installed package the way DeepSpeed's own builder
(`ShareMemCommBuilder`) does, into the same cache, and called without the rest of DeepSpeed.

Each rank creates a block of 66 MiB in /dev/shm, named after MASTER_ADDR and MASTER_PORT, and leaves
it there; `prepare` removes them.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch_core.bench.baselines import Bind, Call, Setup
from deepytorch_core.bench.job import BenchError

if TYPE_CHECKING:
    from deepytorch_core.bench.job import Job
    from deepytorch_core.bench.ops import Buffers, Operation

_PACKAGE = "deepspeed"
_MODULE = "deepspeed_shm_comm"
_SOURCES = ("shm_interface.cpp", "shm.cpp")
_FLAGS = ("-O2", "-fopenmp", "-UC10_USE_GLOG")
_SHARED_MEMORY = Path("/dev/shm")
_RANK_BYTES = 66 << 20
_ADDRESS = "127.0.0.1"
# Instruction set that each type needs, as the op's vector_kernel_level() counts: AVX2, AVX-512.
_LEVELS = {"float32": (1, "AVX2"), "bfloat16": (2, "AVX-512"), "float16": (2, "AVX-512")}


@contextlib.contextmanager
def prepare(world_size: int) -> Iterator[Setup]:
    """Compiles the op unless that was done before (about half a minute, once)."""
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


def compile_op() -> str:
    """Compiles the op with torch's own tool if need be; returns the path of the library."""
    from torch.utils import cpp_extension

    root = _package() / "ops" / "csrc" / "cpu"
    module: Any = cpp_extension.load(
        name=_MODULE,
        sources=[str(root / "comm" / name) for name in _SOURCES],
        extra_include_paths=[str(root / "includes")],
        extra_cflags=list(_FLAGS),
    )
    return str(module.__file__)


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
    """Runs `compile_op` in a process of its own: loading the op registers it in torch for good."""
    done = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BenchError(
            f"DeepSpeed's shared-memory op in {folder} does not compile; it needs a C++ compiler "
            f"and the package ninja:\n{(done.stdout + done.stderr).rstrip()}"
        )
    return done.stdout.splitlines()[-1]


def _import(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, path)
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.stdout.write(compile_op() + "\n")
