"""The names of all baselines of `bench`, and what each offers and needs; see `baselines`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepytorch_core.bench.ops import Buffers, Collective

TORCH_BACKENDS = ("gloo", "nccl")
PEER_MEMORY = ("nccl-symm", "torch-symm")
BASELINES = (*TORCH_BACKENDS, *PEER_MEMORY, "deepspeed-shm", "mpi")

Call = Callable[[], object]
Bind = Callable[["Collective", "Buffers"], Call]
"""Makes the call that runs one operation on these buffers; it returns when the work is done."""


@dataclass(frozen=True)
class RivalLimits:
    """The offers of a rival; None is everything that `bench` knows.

    `backend` is torch's backend of its processes' default group.
    """

    devices: tuple[str, ...] = ("cpu",)
    backend: str = "gloo"
    ops: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    title: str = ""


LIMITS: Mapping[str, RivalLimits] = {
    "gloo": RivalLimits(devices=("cpu", "cuda"), title="gloo"),
    "nccl": RivalLimits(devices=("cuda",), backend="nccl", title="NCCL"),
    "nccl-symm": RivalLimits(
        devices=("cuda",),
        backend="nccl",
        ops=("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"),
        title="NCCL with symmetric memory",
    ),
    "torch-symm": RivalLimits(
        devices=("cuda",),
        backend="nccl",
        ops=("all_reduce", "reduce_scatter"),
        dtypes=("float32", "bfloat16"),
        title="torch's symmetric memory",
    ),
    "deepspeed-shm": RivalLimits(
        ops=("all_reduce",),
        dtypes=("float32", "bfloat16", "float16"),
        title="DeepSpeed's shared-memory op",
    ),
    "mpi": RivalLimits(
        dtypes=("float32", "float64", "int8", "uint8", "int32", "int64"),
        title="MPI",
    ),
}


@dataclass(frozen=True)
class Setup:
    """The things that the ranks of a run need for its baseline.

    `environment` is added to theirs, `settings` is what the record says of it, `versions` are those
    of the rival's packages. With `mpiexec` it starts the ranks.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    mpiexec: Path | None = None
    library: str = ""
