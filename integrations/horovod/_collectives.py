"""The collectives under Horovod's names, as calls of torch.distributed.

Each writes itself into the journal of `_join` before it begins. All ranks must call them in the
same order; torch.distributed pairs calls by order, not by name.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from deepytorch.integrations._contract import IntegrationError
from deepytorch.integrations._horovod_common import HorovodInternalError, ReduceOp

from ._join import Entry
from ._world import ProcessSet, default_device, global_process_set, in_debug, world

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Their names before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TORCH_OPS = {
    ReduceOp.Average: dist.ReduceOp.AVG,
    ReduceOp.Sum: dist.ReduceOp.SUM,
    ReduceOp.Min: dist.ReduceOp.MIN,
    ReduceOp.Max: dist.ReduceOp.MAX,
    ReduceOp.Product: dist.ReduceOp.PRODUCT,
}


def _translated(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Failed collectives as Horovod's exception."""

    @functools.wraps(function)
    def translating(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (IntegrationError, HorovodInternalError):
            raise
        except RuntimeError as error:
            raise HorovodInternalError(str(error)) from error

    return translating


class Handle:
    """An operation under way: for `poll` and `synchronize`."""

    __slots__ = ("_finish", "_result", "_works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def then(self, make: Callable[[Any], Any]) -> Handle:
        """The same operation with a result made of this one's."""
        return Handle([self], lambda: make(self.wait()))

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)

    @_translated
    def wait(self) -> Any:
        """Wait for the end; the result, again the same in a second call."""
        if self._finish is not None:
            for work in self._works:
                work.wait()
            self._result = self._finish()
            self._finish, self._works = None, []
        return self._result


@_translated
def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp,
    process_set: ProcessSet,
    *,
    asynchronous: bool,
    name: str | None,
) -> Handle:
    """Reduce a contiguous tensor in place; the result is the tensor."""
    group = process_set.group
    here = (tensor.numel(), _name(tensor.dtype), tensor.device.type, int(op))
    _begin(("all_reduce", *here), process_set, name)
    floors = op is ReduceOp.Average and not (tensor.is_floating_point() or tensor.is_complex())
    torch_op = dist.ReduceOp.SUM if floors else _TORCH_OPS[op]
    work = dist.all_reduce(tensor, torch_op, group=group, async_op=asynchronous)
    if floors:
        size = group.size()
        return Handle([work], lambda: tensor.floor_divide_(size))
    return Handle([work], lambda: tensor)


@_translated
def all_gather(
    tensor: torch.Tensor, process_set: ProcessSet, *, asynchronous: bool, name: str | None
) -> Handle:
    """Concatenate the ranks' rows; the result is (rows of all, number of rows by rank)."""
    group = process_set.group
    if tensor.dim() == 0:
        raise ValueError("allgather of a scalar: give it a first dimension, tensor.reshape(1)")
    rest = list(tensor.shape[1:])
    _begin(("all_gather", rest, _name(tensor.dtype), tensor.device.type), process_set, name)
    facts = _exchange(process_set, [[tensor.shape[0], _shape_code(tensor)]])
    rows = [int(fact[0]) for fact in facts]
    _check_shapes("allgather", [int(fact[1]) for fact in facts], tensor)
    output = tensor.new_empty([sum(rows), *rest])
    own = tensor.detach().contiguous()
    if len(set(rows)) == 1:
        works = [_all_gather(output, own, group=group, async_op=asynchronous)]
        return Handle(works, lambda: (output, rows))
    # Uneven: gloo has no such all_gather. Every rank's rows go from it to where they belong.
    works = []
    for member, part in enumerate(torch.split(output, rows)):
        if member == group.rank():
            part.copy_(own)
        if part.numel():
            works.append(dist.broadcast(part, group=group, group_src=member, async_op=asynchronous))
    return Handle(works, lambda: (output, rows))


@_translated
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    process_set: ProcessSet,
    *,
    asynchronous: bool,
    name: str | None,
) -> Handle:
    """Give every rank the root's values, in place; the root is named by its global rank."""
    group = process_set.group
    if root_rank not in (process_set.ranks or ()):
        raise ValueError(f"broadcast: root_rank {root_rank} is not in {process_set}")
    here = (tensor.numel(), _name(tensor.dtype), tensor.device.type, root_rank)
    _begin(("broadcast", *here), process_set, name)
    work = dist.broadcast(tensor, src=root_rank, group=group, async_op=asynchronous)
    return Handle([work], lambda: tensor)


@_translated
def all_to_all(
    tensor: torch.Tensor,
    splits: Sequence[int] | None,
    process_set: ProcessSet,
    *,
    asynchronous: bool,
    name: str | None,
) -> Handle:
    """Send `splits[r]` rows to each rank r; the result is (rows received, their number by rank)."""
    group, size = process_set.group, process_set.group.size()
    rows = tensor.shape[0] if tensor.dim() else 0
    problem = None
    if tensor.dim() == 0:
        problem = "a scalar has no rows to send"
    elif splits is None and rows % size:
        problem = f"{rows} rows can't be split evenly over {size} ranks: give splits"
    elif splits is not None and (len(splits) != size or sum(splits) != rows or min(splits) < 0):
        problem = f"splits {list(splits)} must be {size} numbers that add up to {rows} rows"
    # Told to all before anyone raises: the others would wait for this rank.
    rest = list(tensor.shape[1:])
    _begin(("all_to_all", rest, _name(tensor.dtype), tensor.device.type), process_set, name)
    sent = [rows // size] * size if splits is None else list(splits)
    code = -1 if problem else _shape_code(tensor)
    facts = _exchange(process_set, [[0 if problem else part, code] for part in _fit(sent, size)])
    if problem:
        raise ValueError(f"alltoall: {problem}")
    _check_shapes("alltoall", [int(fact[1]) for fact in facts], tensor)
    received = [int(fact[0]) for fact in facts]
    output = tensor.new_empty([sum(received), *rest])
    own = tensor.detach().contiguous()
    work = dist.all_to_all_single(output, own, received, sent, group=group, async_op=asynchronous)
    return Handle([work], lambda: (output, received))


@_translated
def reduce_scatter(
    tensor: torch.Tensor,
    op: ReduceOp,
    process_set: ProcessSet,
    *,
    asynchronous: bool,
    name: str | None,
) -> Handle:
    """Reduce, and keep this rank's rows; the first ranks have one row more where uneven."""
    group = process_set.group
    if tensor.dim() == 0:
        raise ValueError("reducescatter of a scalar: give it a first dimension")
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise ValueError(f"reducescatter: op={op.name} is not supported: use Average or Sum")
    shape = list(tensor.shape)
    _begin(
        ("reduce_scatter", shape, _name(tensor.dtype), tensor.device.type, int(op)),
        process_set,
        name,
    )
    size = group.size()
    each, more = divmod(shape[0], size)
    rows = [each + (member < more) for member in range(size)]
    own = tensor.detach().contiguous()
    if more:
        padded = own.new_zeros([size, each + 1, *shape[1:]])
        for part, whole in zip(torch.split(own, rows), padded, strict=True):
            whole[: part.shape[0]] = part
        own = padded.flatten(0, 1)
    output = own.new_empty([own.shape[0] // size, *shape[1:]])
    floors = op is ReduceOp.Average and not (tensor.is_floating_point() or tensor.is_complex())
    torch_op = dist.ReduceOp.SUM if floors else _TORCH_OPS[op]
    work = _reduce_scatter(output, own, torch_op, group=group, async_op=asynchronous)
    kept = rows[group.rank()]

    def finish() -> torch.Tensor:
        result = output[:kept]
        return result.floor_divide_(size) if floors else result

    return Handle([work], finish)


@_translated
def barrier(process_set: ProcessSet) -> None:
    """Wait for all ranks of the set."""
    _begin(("barrier",), process_set, None)
    dist.barrier(process_set.group)


def join() -> int:
    """Take part in what the other ranks still do, until all have joined; the last one's rank."""
    last: int = world().journal.join(_take_part)
    return last


def _begin(entry: Entry, process_set: ProcessSet, name: str | None) -> None:
    checked = in_debug()
    if checked:
        entry = (*entry, name)
    if process_set is global_process_set:
        world().journal.write(entry)
    if checked:
        _compare_names(entry, process_set)


def _compare_names(entry: Entry, process_set: ProcessSet) -> None:
    """With option `debug`: check that all ranks begin the same operation under the same name."""
    text = json.dumps(entry)
    facts = _exchange(process_set, [[zlib.crc32(text.encode())]])
    if len({int(fact[0]) for fact in facts}) > 1:
        texts = _exchange_texts(process_set, text)
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise HorovodInternalError(f"the ranks of {process_set} begin different operations: {said}")


def _exchange_texts(process_set: ProcessSet, text: str) -> list[str]:
    """The texts of all ranks, by rank; as bytes, so that nothing is unpickled."""
    own = [*text.encode()]
    longest = max(int(length[0]) for length in _exchange(process_set, [[len(own)]]))
    rows = _exchange(process_set, [[len(own), *own, *[0] * (longest - len(own))]])
    return [bytes(row[1 : 1 + row[0]]).decode() for row in rows]


def _exchange(process_set: ProcessSet, numbers: list[list[int]]) -> list[list[int]]:
    """Small facts of all ranks, by rank: a row for all of them, or one for each."""
    own = torch.tensor(numbers, dtype=torch.int64, device=default_device(process_set))
    size = process_set.group.size()
    theirs = own.new_empty([size, own.shape[1]])
    if own.shape[0] == size and size > 1:
        dist.all_to_all_single(theirs, own, group=process_set.group)
    else:
        _all_gather(theirs, own, group=process_set.group)
    rows: list[list[int]] = theirs.tolist()
    return rows


def _fit(splits: list[int], size: int) -> list[int]:
    return splits if len(splits) == size else [0] * size


def _shape_code(tensor: torch.Tensor) -> int:
    """A number for what must be the same on all ranks of uneven operations."""
    return zlib.crc32(f"{list(tensor.shape[1:])} {tensor.dtype}".encode())


def _check_shapes(what: str, codes: list[int], tensor: torch.Tensor) -> None:
    own = _shape_code(tensor)
    different = [member for member, code in enumerate(codes) if code != own]
    if different:
        raise HorovodInternalError(
            f"{what}: this rank's tensor has shape {list(tensor.shape)} and {tensor.dtype}; rank(s)"
            f" {different} of the set differ in dtype or beyond the first dimension"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _take_part(entry: Entry) -> None:
    """The part of a rank that joined: zero rows, or the value that changes nothing."""
    kind, facts = entry[0], entry[1:]
    name = facts[-1] if in_debug() else None
    how: dict[str, Any] = {"asynchronous": False, "name": name}
    everyone = global_process_set
    if kind == "barrier":
        barrier(everyone)
        return
    place: dict[str, Any] = {"dtype": getattr(torch, facts[1]), "device": _device(facts[2])}
    if kind == "all_reduce":
        op = ReduceOp(facts[3])
        value = torch.full([facts[0]], _neutral(op, place["dtype"]), **place)
        all_reduce(value, op, everyone, **how)
    elif kind == "all_gather":
        all_gather(torch.empty([0, *facts[0]], **place), everyone, **how)
    elif kind == "all_to_all":
        splits = [0] * everyone.group.size()
        all_to_all(torch.empty([0, *facts[0]], **place), splits, everyone, **how)
    elif kind == "reduce_scatter":
        value = torch.zeros(facts[0], **place)
        reduce_scatter(value, ReduceOp(facts[3]), everyone, **how)
    elif facts[3] == everyone.rank():
        everyone.group.abort()  # or the others would wait for what this rank does not have
        raise HorovodInternalError(f"broadcast from rank {facts[3]}, which has joined")
    else:
        broadcast(torch.empty([facts[0]], **place), facts[3], everyone, **how)


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


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
