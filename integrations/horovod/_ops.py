"""The collectives users call. Those that return tensors can be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepytorch.integrations._horovod_common import ReduceOp, no_such_feature, reduce_op

from . import _autograd, _collectives
from ._collectives import Handle
from ._compression import Compression, Compressor
from ._fusion import Fusion, scale_
from ._world import ProcessSet, global_process_set

_Factors = tuple[float, float]


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return at once."""
    return handle.is_completed()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation; its result: a tensor, or what the operation's own docstring says.

    Raises HorovodInternalError, on every rank, when the operation failed.
    """
    return handle.wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `allreduce_`; `synchronize(handle)` returns the tensor."""
    factors = (prescale_factor, postscale_factor)
    return _reduce_one(tensor, reduce_op(op, average), factors, process_set, (True, name))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `allreduce` without a gradient; `synchronize(handle)` returns the new tensor."""
    factors = (prescale_factor, postscale_factor)
    own = _copy(tensor)
    return _reduce_one(own, reduce_op(op, average), factors, process_set, (True, name))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks, in place.

    Args:
        tensor: the same shape and dtype on every rank.
        average: deprecated, use `op`.
        name: shown in errors with option `debug`, where ranks must agree on it.
        op: Average (default), Sum, Min, Max or Product. The average of integers is rounded down.
        prescale_factor, postscale_factor: multiply what goes in, and what comes out.
        process_set: the ranks that take part.

    Raises HorovodInternalError, on every rank, for shapes or dtypes that differ.
    """
    factors = (prescale_factor, postscale_factor)
    handle = _reduce_one(tensor, reduce_op(op, average), factors, process_set, (False, name))
    result: torch.Tensor = handle.wait()
    return result


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks into a new one; arguments as in `allreduce_`.

    The gradient is reduced in the same way, with the same op and factors.
    """
    chosen = reduce_op(op, average)
    factors = (prescale_factor, postscale_factor)

    def reduce(value: torch.Tensor) -> torch.Tensor:
        handle = _reduce_one(_copy(value), chosen, factors, process_set, (False, name))
        result: torch.Tensor = handle.wait()
        return result

    sent, ctx = compression.compress(tensor)
    return compression.decompress(_autograd.symmetric(reduce, sent), ctx)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `grouped_allreduce_`; `synchronize(handle)` returns the tensors."""
    return Fusion(tensors).all_reduce(
        tensors,
        reduce_op(op, average),
        process_set,
        factors=(prescale_factor, postscale_factor),
        name=name,
    )


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    **settings: Any,
) -> Handle:
    """Begin `grouped_allreduce` without a gradient; arguments as there."""
    own = [_copy(tensor) for tensor in tensors]
    return grouped_allreduce_async_(own, average, name, op, **settings)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    **settings: Any,
) -> list[torch.Tensor]:
    """`allreduce_` of several tensors at once, small ones in one buffer; arguments as there."""
    result: list[torch.Tensor] = grouped_allreduce_async_(
        tensors, average, name, op, **settings
    ).wait()
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    **settings: Any,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors at once, small ones in one buffer; arguments as there."""
    chosen = reduce_op(op, average)

    def reduce(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(grouped_allreduce_([_copy(v) for v in values], op=chosen, **settings))

    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced = _autograd.symmetric(reduce, *(sent for sent, _ in compressed))
    return [
        compression.decompress(result, ctx)
        for result, (_, ctx) in zip(reduced, compressed, strict=True)
    ]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin the sum or average of sparse COO tensors; `synchronize(handle)` returns a sparse one.

    The ranks' indices and values are gathered: every rank may have its own number of them.
    """
    chosen = reduce_op(op)
    if chosen not in (ReduceOp.Average, ReduceOp.Sum):
        raise ValueError(f"op={chosen.name} of sparse tensors is not supported")
    own = tensor.detach().coalesce()
    how: dict[str, Any] = {"asynchronous": True, "name": name}
    indices = _collectives.all_gather(own.indices().t(), process_set, **how)
    values = _collectives.all_gather(own.values(), process_set, **how)

    def finish() -> torch.Tensor:
        summed = torch.sparse_coo_tensor(
            indices.wait()[0].t(),
            values.wait()[0],
            own.shape,
            device=own.device,
            check_invariants=False,
        ).coalesce()
        return summed / process_set.group.size() if chosen is ReduceOp.Average else summed

    return Handle([indices, values], finish)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin `allgather` without a gradient. Waits until all ranks have told their sizes."""
    handle = _collectives.all_gather(tensor, process_set, asynchronous=True, name=name)
    return handle.then(lambda result: result[0])


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in which they may differ.

    The gradient is averaged over the ranks, and each takes its own rows of it.

    Raises HorovodInternalError, on every rank, for other shapes or dtypes that differ.
    """
    return _autograd.gather(tensor, process_set, name)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `grouped_allgather` without a gradient."""
    handles = [allgather_async(tensor, name, process_set) for tensor in tensors]
    return Handle(handles, lambda: [handle.wait() for handle in handles])


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allgather` of several tensors."""
    return [allgather(tensor, name, process_set) for tensor in tensors]


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `broadcast_`; `synchronize(handle)` returns the tensor."""
    return _with_contiguous(
        tensor,
        lambda whole: _collectives.broadcast(
            whole, root_rank, process_set, asynchronous=True, name=name
        ),
    )


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `broadcast` without a gradient; `synchronize(handle)` returns the new tensor."""
    return broadcast_async_(_copy(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Give every rank the values of the root, a global rank also with a process set; in place."""
    result: torch.Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`broadcast_` into a new tensor.

    The root's gradient is the average over the ranks, the others' is zero.
    """
    return _autograd.broadcast(tensor, root_rank, process_set, name)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `alltoall` without a gradient. Waits until all ranks have told their splits."""
    handle = _collectives.all_to_all(
        tensor, _numbers(splits), process_set, asynchronous=True, name=name
    )
    return handle.then(lambda result: _with_splits(result, splits))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows to each rank, and receive rows from each.

    Args:
        tensor: its rows go to the ranks in order; shapes are equal beyond the first dimension.
        splits: how many rows go to each rank; None: equally many.
        name, process_set: as in `allreduce_`.

    Returns the rows received; with `splits` also how many came from each rank, an int32 tensor.
    """
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = _with_splits(
        _autograd.exchange(tensor, _numbers(splits), process_set, name), splits
    )
    return result


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.Average,
    *,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin `reducescatter` without a gradient; `synchronize(handle)` returns this rank's rows."""
    value = tensor.detach()
    if prescale_factor != 1.0:
        value = value.clone()
        scale_(value, prescale_factor)
    handle = _collectives.reduce_scatter(
        value, reduce_op(op), process_set, asynchronous=True, name=name
    )

    def scaled(result: torch.Tensor) -> torch.Tensor:
        scale_(result, postscale_factor)
        return result

    return handle.then(scaled)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = ReduceOp.Average,
    **settings: Any,
) -> torch.Tensor:
    """Reduce over the ranks; each keeps its share of the rows, the first ones one more if uneven.

    Args:
        tensor: the same shape and dtype on every rank.
        name: as in `allreduce_`.
        compression: a class of `Compression`.
        op: Average or Sum.
        **settings: process_set, prescale_factor, postscale_factor, as in `allreduce_`.
    """
    sent, ctx = compression.compress(tensor)
    result = _autograd.scatter(sent, reduce_op(op), name, settings)
    return compression.decompress(result, ctx)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.Average,
    **settings: Any,
) -> Handle:
    """Begin `grouped_reducescatter` without a gradient."""
    handles = [reducescatter_async(tensor, name, op, **settings) for tensor in tensors]
    return Handle(handles, lambda: [handle.wait() for handle in handles])


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = ReduceOp.Average,
    **settings: Any,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors; arguments as there."""
    return [reducescatter(tensor, name, compression, op, **settings) for tensor in tensors]


def join(device: int = -1) -> int:
    """Say that this rank has no more batches; returns when every rank has said so.

    Until then it takes part in what the others do over all ranks: it adds zeros to an allreduce and
    no rows to an allgather. An average still divides by the number of all ranks.

    Args:
        device: ignored, there for scripts that give it.

    Returns the rank that joined last. Raises HorovodInternalError when a rank that has joined is
    the root of a broadcast.
    """
    del device
    return _collectives.join()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Not supported: raises IntegrationError."""
    raise no_such_feature("the timeline", "use torch.profiler, and print(deepytorch.report())")


def stop_timeline() -> None:
    """Not supported: raises IntegrationError."""
    raise no_such_feature("the timeline", "use torch.profiler, and print(deepytorch.report())")


def _reduce_one(
    tensor: torch.Tensor,
    op: ReduceOp,
    factors: _Factors,
    process_set: ProcessSet,
    how: tuple[bool, str | None],
) -> Handle:
    def start(whole: torch.Tensor) -> Handle:
        scale_(whole, factors[0])
        handle = _collectives.all_reduce(whole, op, process_set, asynchronous=how[0], name=how[1])
        return handle.then(lambda result: scale_(result, factors[1]))

    return _with_contiguous(tensor, start)


def _with_contiguous(tensor: torch.Tensor, start: Callable[[torch.Tensor], Handle]) -> Handle:
    """An operation in place on a tensor of any strides; its result is that tensor."""
    plain = tensor.detach()
    whole = plain.contiguous()
    handle = start(whole)

    def result(_: Any) -> torch.Tensor:
        if whole.data_ptr() != plain.data_ptr():
            plain.copy_(whole)
        return tensor

    return handle.then(result)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _numbers(splits: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    if splits is None:
        return None
    found = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    return [int(split) for split in found]


def _with_splits(result: tuple[torch.Tensor, list[int]], splits: Any) -> Any:
    rows, counts = result
    return rows if splits is None else (rows, torch.tensor(counts, dtype=torch.int32, device="cpu"))
