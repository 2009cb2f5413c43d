"""The baselines of `bench`: torch's own backends, and rivals that are no torch backend.

A rival comes as an optional package. `prepare` makes it ready in the launcher, before any rank
starts, and says what to install when it is missing; `connect` gives a rank its calls. Rivals of
`PEER_MEMORY` are torch's own but need memory of theirs: `connected` gives calls with buffers.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from deepytorch_core.bench.rivals import Setup

if TYPE_CHECKING:
    from deepytorch_core.bench.baselines.arm import Measure, Prepare
    from deepytorch_core.bench.job import CollectivesJob
    from deepytorch_core.bench.rivals import Bind
    from deepytorch_core.bench.rows import Row
    from deepytorch_core.bench.worker import Groups


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


def connect(job: "CollectivesJob", rank: int) -> "Bind":
    """This rank's calls of a baseline that is no torch backend."""
    if job.baseline == "deepspeed-shm":
        from deepytorch_core.bench.baselines import deepspeed_shm

        return deepspeed_shm.connect(job, rank)
    from deepytorch_core.bench.baselines import mpi

    return mpi.connect(job, rank)


@contextlib.contextmanager
def connected(
    job: "CollectivesJob", groups: "Groups", rows: Sequence["Row"], bind: "Bind", measure: "Measure"
) -> Iterator["Prepare"]:
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
