"""DeepSpeed's all_reduce in shared memory for CPU inference, `inference_all_reduce_`.

Its op is compiled by DeepSpeed's own builder, `ShareMemCommBuilder`, and called without the rest of
DeepSpeed.

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

from deepytorch_core.base import config
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.rivals import Bind, Call, Setup

if TYPE_CHECKING:
    from deepytorch_core.bench.job import CollectivesJob
    from deepytorch_core.bench.ops import Buffers, Collective

_PACKAGE = "deepspeed"
_MODULE = "deepspeed_shm_comm"
_BUILDER = (
    "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder\n"
    "print(ShareMemCommBuilder().load(verbose=False).__file__)"
)
_BUILD_TIMEOUT_S = 600  # it takes a minute or two; who dies in it leaves others waiting for ever
_SHARED_MEMORY = Path("/dev/shm")
_RANK_BYTES = 66 << 20
_ADDRESS = "127.0.0.1"
# Instruction set that each type needs, as the op's vector_kernel_level() counts: AVX2, AVX-512.
_LEVELS = {"float32": (1, "AVX2"), "bfloat16": (2, "AVX-512"), "float16": (2, "AVX-512")}


@contextlib.contextmanager
def prepare(world_size: int) -> Iterator[Setup]:
    """Builds the op and chooses the names of its shared memory, which is removed at the end."""
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
    library = _build()
    try:
        yield Setup(
            environment=environment,
            settings={"LOCAL_SIZE": str(world_size), "OpenMP threads per rank": "1"},
            versions={_PACKAGE: metadata.version(_PACKAGE)},
            library=library,
        )
    finally:
        prefix = f"deepspeed_allreduce_buffer_{os.getuid()}_{_ADDRESS}_{token}"
        for rank in range(world_size):
            (_SHARED_MEMORY / f"{prefix}_{rank}").unlink(missing_ok=True)


def connect(job: "CollectivesJob", rank: int) -> Bind:
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

    def bind(_: "Collective", buffers: "Buffers") -> Call:
        return lambda: torch.ops.deepspeed.inference_all_reduce_(buffers.input)

    return bind


def _build() -> str:
    """Has DeepSpeed's own builder make the op, unless it did before; returns the library's path.

    In a process of its own: importing DeepSpeed takes seconds, and it changes how torch behaves.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise BenchError(
            "--baseline deepspeed-shm needs DeepSpeed: DS_BUILD_OPS=0 pip install deepspeed"
        )
    variables = config.child_environment()
    # Pip put ninja there, also if that environment is not the shell's.
    path = os.pathsep.join((str(Path(sys.executable).parent), variables.get("PATH", os.defpath)))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BUILDER],
            env=variables | {"PATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=_BUILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(
            f"DeepSpeed's shared-memory op was not built within {_BUILD_TIMEOUT_S} s: if no "
            f"process is compiling it, remove {_MODULE}/lock in torch's folder of extensions "
            "(TORCH_EXTENSIONS_DIR, by default ~/.cache/torch_extensions)"
        ) from None
    if done.returncode != 0:
        raise BenchError(
            f"DeepSpeed {metadata.version(_PACKAGE)} can't build its shared-memory op:\n"
            f"{done.stderr.rstrip()}"
        )
    return done.stdout.splitlines()[-1]


def _import(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, path)
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
