"""The measured collectives: the size of their buffers and their public torch.distributed call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

# torch 2.13 renamed them, and warns at each call of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Allocate = Callable[[int, torch.dtype], torch.Tensor]
Invoke = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
Submit = Callable[[torch.Tensor, torch.Tensor, Any], Any]


@dataclass(frozen=True)
class Collective:
    """One collective. `call` gets (input, output, group) and returns when the work is enqueued
    (GPU) or done (CPU); `submit` gets (input, output, backend) and returns the c10d Work. The sizes
    of input and output are in shares, None is one per rank."""

    name: str
    call: Invoke
    submit: Submit
    reduces: bool = False
    in_place: bool = False  # input and output are the same tensor
    split: bool = True  # nccl-tests' size covers every rank's share
    input_shares: int | None = 1
    output_shares: int | None = 1


@dataclass(frozen=True)
class Buffers:
    """Flat tensors of one arm; the same tensor twice for an operation in place."""

    input: torch.Tensor
    output: torch.Tensor


def _waited_for(options: Any) -> Any:
    """c10d's options of a call that the caller waits for."""
    options.asyncOp = False
    return options


_ALL_REDUCE = _waited_for(c10d.AllreduceOptions())
_ALL_GATHER = _waited_for(c10d.AllgatherOptions())
_REDUCE_SCATTER = _waited_for(c10d.ReduceScatterOptions())
_BROADCAST = _waited_for(c10d.BroadcastOptions())
_ALL_TO_ALL = _waited_for(c10d.AllToAllOptions())
_BARRIER = _waited_for(c10d.BarrierOptions())

OPERATIONS = {
    op.name: op
    for op in (
        Collective(
            "all_reduce",
            lambda source, _, group: dist.all_reduce(source, group=group),
            lambda source, _, backend: backend.allreduce([source], _ALL_REDUCE),
            reduces=True,
            in_place=True,
            split=False,
        ),
        Collective(
            "all_gather",
            lambda source, target, group: _all_gather(target, source, group=group),
            lambda source, target, backend: backend._allgather_base(target, source, _ALL_GATHER),
            output_shares=None,
        ),
        Collective(
            "reduce_scatter",
            lambda source, target, group: _reduce_scatter(target, source, group=group),
            lambda source, target, backend: backend._reduce_scatter_base(
                target, source, _REDUCE_SCATTER
            ),
            reduces=True,
            input_shares=None,
        ),
        Collective(
            "broadcast",
            lambda source, _, group: dist.broadcast(source, group_src=0, group=group),
            lambda source, _, backend: backend.broadcast([source], _BROADCAST),
            in_place=True,
            split=False,
        ),
        Collective(
            "all_to_all",
            lambda source, target, group: dist.all_to_all_single(target, source, group=group),
            lambda source, target, backend: backend.alltoall_base(
                target, source, [], [], _ALL_TO_ALL
            ),
            input_shares=None,
            output_shares=None,
        ),
        Collective(
            "barrier",
            lambda _source, _target, group: dist.barrier(group=group),
            lambda _source, _target, backend: backend.barrier(_BARRIER),
        ),
    )
}


def share_of(op: Collective, num_bytes: int, dtype: torch.dtype, world_size: int) -> int:
    """Elements of one share for nccl-tests' size `num_bytes`, rounded down, at least 1."""
    return max(1, num_bytes // dtype.itemsize // (world_size if op.split else 1))


def bytes_of(op: Collective, share: int, dtype: torch.dtype, world_size: int) -> int:
    """nccl-tests' size of an operation with this share."""
    return share * dtype.itemsize * (world_size if op.split else 1)


def share_bytes(op: Collective, share: int, dtype: torch.dtype, world_size: int) -> tuple[int, int]:
    """Bytes of the input, and of the output where that is a tensor of its own, else 0."""
    source = share * (op.input_shares or world_size) * dtype.itemsize
    target = share * (op.output_shares or world_size) * dtype.itemsize
    return source, 0 if op.in_place else target


def make_buffers(
    op: Collective,
    share: int,
    dtype: torch.dtype,
    world_size: int,
    allocate: Allocate,
) -> Buffers:
    """Uninitialised buffers for one arm."""
    source = allocate(share * (op.input_shares or world_size), dtype)
    if op.in_place:
        return Buffers(source, source)
    return Buffers(source, allocate(share * (op.output_shares or world_size), dtype))
