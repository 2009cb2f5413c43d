"""NCCL on buffers in its symmetric memory: a memory pool registered with the group's communicator.

NCCL then runs the kernels that reach into the peers' buffers. Which of them it has depends on the
machine and on the variables NCCL_..., all of which stay as the user has them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deepytorch_core.bench.baselines.arm import Prepare, TimedArm
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.memory import Arena
from deepytorch_core.bench.rivals import Bind

if TYPE_CHECKING:
    from deepytorch_core.bench.rows import Row
    from deepytorch_core.bench.worker import Groups


@contextlib.contextmanager
def connected(groups: "Groups", rows: Sequence["Row"], bind: Bind) -> Iterator[Prepare]:
    """Arms in one registered pool, made for the largest of `rows`."""
    # NCCL's: torch types the base class only.
    backend: Any = groups.baseline._get_backend(groups.device)
    pool = make_pool(backend)

    def allocate(count: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(count, dtype=dtype, device=groups.device)

    arena = Arena(rows, allocate)
    # Registration needs the communicator, which the first operation makes.
    dist.all_reduce(torch.zeros(1, device=groups.device), group=groups.baseline)
    torch.cuda.synchronize()
    register(backend, pool)
    groups.ranks.barrier()

    def prepare(row: "Row") -> TimedArm:
        buffers = arena.buffers(row)
        return TimedArm(bind(row.op, buffers), buffers)

    yield prepare
    torch.cuda.synchronize()
    groups.ranks.barrier()
    backend.deregister_mem_pool(pool)


def make_pool(backend: Any) -> Any:
    """A pool of the backend's own allocator; BenchError where torch or NCCL have none."""
    try:
        return torch.cuda.MemPool(backend.mem_allocator)
    except (AttributeError, RuntimeError) as error:
        raise _too_old(str(error)) from error


def register(backend: Any, pool: Any) -> None:
    """Makes the pool's memory symmetric; BenchError where torch cannot."""
    try:
        backend.register_mem_pool(pool, symm=True)
    except (AttributeError, TypeError) as error:
        # The first line names what is missing; the others list what there is.
        raise _too_old(str(error).splitlines()[0]) from error


def _too_old(reason: str) -> BenchError:
    return BenchError(
        f"--baseline nccl-symm needs torch 2.9 or newer with NCCL 2.27 or newer, this is torch "
        f"{torch.__version__} ({reason}): update it, or use --baseline nccl"
    )
