"""The collectives that Horovod has and torch.distributed has not quite, on a group of torch's.

All ranks of the group must call them in the same order. `_rounds` sees to that for what users
begin; `ordered_all_reduce` is for callers in this package whose order is the same everywhere.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepytorch.integrations.common.horovod_common import HorovodInternalError, ReduceOp

from ._handle import Handle, translated
from ._join import Entry
from ._world import ProcessSet, default_device, global_process_set, in_debug, world

# Their names before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TORCH_OPS = {
    ReduceOp.Average: dist.ReduceOp.AVG,
    ReduceOp.Sum: dist.ReduceOp.SUM,
    ReduceOp.Min: dist.ReduceOp.MIN,
    ReduceOp.Max: dist.ReduceOp.MAX,
    ReduceOp.Product: dist.ReduceOp.PRODUCT,
}


class Where(NamedTuple):
    """The group that an operation runs on, and whether it is only begun there."""

    group: dist.ProcessGroup
    asynchronous: bool


class Reduction(NamedTuple):
    """How values become one, and the factors that what goes in and what comes out is given."""

    op: ReduceOp
    before: float = 1.0
    after: float = 1.0


def all_reduce(tensor: torch.Tensor, op: ReduceOp, where: Where) -> Handle:
    """Reduce a contiguous tensor in place; the average of integers is still their sum."""
    work = dist.all_reduce(
        tensor, _torch_op(op, tensor), group=where.group, async_op=where.asynchronous
    )
    return Handle([work], lambda: tensor)


def all_gather(tensor: torch.Tensor, rows: list[int], where: Where) -> Handle:
    """Concatenate the ranks' rows, of which rank r has `rows[r]`."""
    output = tensor.new_empty([sum(rows), *tensor.shape[1:]])
    own = tensor.contiguous()
    if len(set(rows)) == 1:
        works = [all_gather_single(output, own, group=where.group, async_op=where.asynchronous)]
        return Handle(works, lambda: output)
    # Uneven: gloo has no such all_gather. Every rank's rows go from it to where they belong.
    works = []
    for member, part in enumerate(torch.split(output, rows)):
        if member == where.group.rank():
            part.copy_(own)
        if part.numel():
            works.append(_broadcast(part, member, where))
    return Handle(works, lambda: output)


def broadcast(tensor: torch.Tensor, root: int, where: Where) -> Handle:
    """Give every rank the values of rank `root` of the group, in place."""
    return Handle([_broadcast(tensor, root, where)], lambda: tensor)


def all_to_all(
    tensor: torch.Tensor,
    rows: tuple[list[int], list[int]],
    where: Where,
) -> Handle:
    """Exchange rows: `rows` is how many go to each rank, and how many come from each."""
    sent, received = rows
    output = tensor.new_empty([sum(received), *tensor.shape[1:]])
    own = tensor.contiguous()
    work = dist.all_to_all_single(
        output, own, received, sent, group=where.group, async_op=where.asynchronous
    )
    return Handle([work], lambda: output)


def reduce_scatter(tensor: torch.Tensor, op: ReduceOp, where: Where) -> Handle:
    """Reduce, and keep this rank's rows; the first ranks have one row more where uneven.

    The average of integers is still their sum.
    """
    size = where.group.size()
    each, more = divmod(tensor.shape[0], size)
    rows = [each + (member < more) for member in range(size)]
    own = tensor.contiguous()
    if more:
        padded = own.new_zeros([size, each + 1, *tensor.shape[1:]])
        for part, whole in zip(torch.split(own, rows), padded, strict=True):
            whole[: part.shape[0]] = part
        own = padded.flatten(0, 1)
    output = own.new_empty([own.shape[0] // size, *tensor.shape[1:]])
    torch_op = _torch_op(op, tensor)
    work = _reduce_scatter(output, own, torch_op, group=where.group, async_op=where.asynchronous)
    return Handle([work], lambda: output[: rows[where.group.rank()]])


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers are cut off, as Horovod does."""
    if factor == 1.0:
        return
    if _is_whole(tensor):
        tensor.copy_((tensor.double() * factor).trunc())
    else:
        tensor.mul_(factor)


def finish_(tensor: torch.Tensor, op: ReduceOp, factor: float, size: int) -> torch.Tensor:
    """Finish a reduction: apply the factor, and make a sum of integers a mean.

    The mean is cut off, as Horovod does.
    """
    scale_(tensor, factor)
    if op is ReduceOp.Average and _is_whole(tensor):
        tensor.div_(size, rounding_mode="trunc")
    return tensor


@translated
def ordered_all_reduce(
    tensor: torch.Tensor, op: ReduceOp, process_set: ProcessSet, *, asynchronous: bool
) -> Handle:
    """`all_reduce` on the set's own group, where ranks that joined take part in it."""
    where = Where(process_set.group, asynchronous)
    here = (tensor.numel(), dtype_name(tensor.dtype), tensor.device.type, int(op))
    _begin(("all_reduce", *here), process_set)
    return all_reduce(tensor, op, where)


@translated
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has come here."""
    _begin(("barrier",), process_set)
    dist.barrier(process_set.group)


@translated
def join() -> int:
    """Take part in what the other ranks still do, until all have joined; the last one's rank."""
    journal, rounds = world().journal, global_process_set.rounds
    # In this order: what the rounds let others finish must find the rank announced.
    journal.announce()
    rounds.join()
    last: int = journal.join(_take_part, rounds.check)
    rounds.end_join()
    return last


def _begin(entry: Entry, process_set: ProcessSet) -> None:
    if process_set is global_process_set:
        world().journal.write(entry)
    if in_debug():
        _compare(entry, process_set)


def _compare(entry: Entry, process_set: ProcessSet) -> None:
    """With option `debug`: check that all ranks begin the same operation."""
    text = json.dumps(entry)
    facts = _exchange(process_set, [zlib.crc32(text.encode())])
    if len({fact[0] for fact in facts}) > 1:
        own = [*text.encode()]
        longest = max(length[0] for length in _exchange(process_set, [len(own)]))
        rows = _exchange(process_set, [len(own), *own, *[0] * (longest - len(own))])
        texts = [bytes(row[1 : 1 + row[0]]).decode() for row in rows]
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise HorovodInternalError(f"the ranks of {process_set} begin different operations: {said}")


def _exchange(process_set: ProcessSet, numbers: list[int]) -> list[list[int]]:
    """Every rank's numbers, by rank."""
    own = torch.tensor(numbers, dtype=torch.int64, device=default_device(process_set))
    theirs = own.new_empty([process_set.group.size(), len(numbers)])
    all_gather_single(theirs, own, group=process_set.group)
    rows: list[list[int]] = theirs.tolist()
    return rows


def _take_part(entry: Entry) -> None:
    """The part of a rank that joined: the value that changes nothing."""
    if entry[0] == "barrier":
        barrier(global_process_set)
        return
    numel, dtype, device, op = entry[1:]
    value = neutral([numel], dtype, device, ReduceOp(op))
    ordered_all_reduce(value, ReduceOp(op), global_process_set, asynchronous=False)


def neutral(shape: list[int], dtype: str, device: str, op: ReduceOp = ReduceOp.Sum) -> torch.Tensor:
    """A tensor that changes nothing in a reduction; `dtype` and the kind of `device` by name."""
    found: torch.dtype = getattr(torch, dtype)
    place = torch.device(device)
    if place.type != "cpu":
        place = torch.device(device, torch.accelerator.current_device_index())
    return torch.full(shape, _neutral(op, found), dtype=found, device=place)


def _neutral(op: ReduceOp, dtype: torch.dtype) -> float | int:
    if op in (ReduceOp.Average, ReduceOp.Sum):
        return 0
    if op is ReduceOp.Product:
        return 1
    if dtype is torch.bool:
        return op is ReduceOp.Min
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if dtype.is_floating_point:
        return float("inf") if op is ReduceOp.Min else float("-inf")
    return limits.max if op is ReduceOp.Min else limits.min


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which torch has it."""
    return str(dtype).removeprefix("torch.")


def _broadcast(tensor: torch.Tensor, root: int, where: Where) -> Any:
    return dist.broadcast(tensor, group=where.group, group_src=root, async_op=where.asynchronous)


def _torch_op(op: ReduceOp, tensor: torch.Tensor) -> Any:
    sums = op is ReduceOp.Average and _is_whole(tensor)
    return dist.ReduceOp.SUM if sums else _TORCH_OPS[op]


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
