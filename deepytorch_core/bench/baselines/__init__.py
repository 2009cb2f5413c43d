"""The baselines of `bench`: torch's own backends, and rivals that are no torch backend.

A rival comes as an optional package. `prepare` makes it ready in the launcher, before any rank
starts, and says what to install when it is missing; `connect` gives a rank its calls. Rivals of
`PEER_MEMORY` are torch's own but need memory of theirs: `connected` gives calls with buffers.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepytorch_core.bench.job import Job
    from deepytorch_core.bench.ops import Buffers, Operation
    from deepytorch_core.bench.rows import Row
    from deepytorch_core.bench.worker import Groups

TORCH_BACKENDS = ("gloo", "nccl")
PEER_MEMORY = ("nccl-symm", "torch-symm")
BASELINES = (*TORCH_BACKENDS, *PEER_MEMORY, "deepspeed-shm", "mpi")

Call = Callable[[], object]
Bind = Callable[["Operation", "Buffers"], Call]
"""Makes the call that runs one operation on these buffers; it returns when the work is done."""


@dataclass(frozen=True)
class Trial:
    """One arm of a row: its call, the call's buffers, and which of its ways it is ("": the one)."""

    call: Call
    buffers: "Buffers"
    way: str = ""


Prepare = Callable[["Row"], Trial]
"""Makes an arm of a row ready. All ranks take part."""

Measure = Callable[[Call], float]
"""About how long a call takes, the way the run times calls; equal on all ranks, which take part."""


@dataclass(frozen=True)
class Limits:
    """The offers of a rival; None is everything that `bench` knows.

    `backend` is torch's backend of its processes' default group.
    """

    devices: tuple[str, ...] = ("cpu",)
    backend: str = "gloo"
    ops: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    title: str = ""


LIMITS: Mapping[str, Limits] = {
    "gloo": Limits(devices=("cpu", "cuda"), title="gloo"),
    "nccl": Limits(devices=("cuda",), backend="nccl", title="NCCL"),
    "nccl-symm": Limits(
        devices=("cuda",),
        backend="nccl",
        ops=("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"),
        title="NCCL with symmetric memory",
    ),
    "torch-symm": Limits(
        devices=("cuda",),
        backend="nccl",
        ops=("all_reduce", "reduce_scatter"),
        dtypes=("float32", "bfloat16"),
        title="torch's symmetric memory",
    ),
    "deepspeed-shm": Limits(
        ops=("all_reduce",),
        dtypes=("float32", "bfloat16", "float16"),
        title="DeepSpeed's shared-memory op",
    ),
    "mpi": Limits(
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


@contextlib.contextmanager
def prepare(baseline: str, world_size: int) -> Iterator[Setup]:
    """Makes the baseline ready for that many ranks, and removes what it leaves behind.

    Raises BenchError when a package is missing or does not work here.
    """
    if baseline == "deepspeed-shm":
        from deepytorch_core.bench.baselines import deepspeed_shm

        with deepspeed_shm.prepare(world_size) as setup:
            yield setup
    elif baseline == "mpi":
        from deepytorch_core.bench.baselines import mpi

        yield mpi.prepare()
    elif baseline == "torch-symm":
        from deepytorch_core.bench.baselines import torch_symm

        yield torch_symm.prepare()
    else:
        yield Setup()


def connect(job: "Job", rank: int) -> Bind:
    """This rank's calls of a baseline that is no torch backend."""
    if job.baseline == "deepspeed-shm":
        from deepytorch_core.bench.baselines import deepspeed_shm

        return deepspeed_shm.connect(job, rank)
    from deepytorch_core.bench.baselines import mpi

    return mpi.connect(job, rank)


@contextlib.contextmanager
def connected(
    job: "Job", groups: "Groups", rows: Sequence["Row"], bind: Bind, measure: Measure
) -> Iterator[Prepare]:
    """This rank's arms of a rival in `PEER_MEMORY`, while the context is open.

    Their memory is enough for each of `rows`. `bind` makes the calls of the baseline's group.
    Raises BenchError where torch is too old.
    """
    if job.baseline == "nccl-symm":
        from deepytorch_core.bench.baselines import nccl_symm

        with nccl_symm.connected(groups, rows, bind) as prepare_row:
            yield prepare_row
    else:
        from deepytorch_core.bench.baselines import torch_symm

        yield torch_symm.connect(groups, rows, measure)
