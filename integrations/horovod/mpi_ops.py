"""The operations users call, and what else Horovod's module of this name has.

Those that return tensors can be differentiated. Each is paired with the other ranks' by `name`,
and by its number where it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepytorch.integrations.common.horovod_common import (
    HorovodInternalError,  # noqa: F401  Horovod's module has it too, and the others so marked
    ReduceOp,
    no_such_feature,
    reduce_op,
)
from deepytorch.integrations.horovod import _autograd, _collectives, _requests
from deepytorch.integrations.horovod._built import (  # noqa: F401
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from deepytorch.integrations.horovod._collectives import Reduction, barrier  # noqa: F401
from deepytorch.integrations.horovod._handle import Handle
from deepytorch.integrations.horovod._requests import copied, names_of_parts
from deepytorch.integrations.horovod._world import (  # noqa: F401
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from deepytorch.integrations.horovod.compression import Compression, Compressor
from deepytorch.integrations.horovod.util import (  # noqa: F401
    check_installed_version,
    gpu_available,
    num_rank_is_power_2,
)

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


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
    reduction = Reduction(reduce_op(op, average), prescale_factor, postscale_factor)
    handle = process_set.rounds.begin(
        lambda: _requests.all_reduce([tensor], reduction), name, asynchronous=True
    )
    return handle.then(_only)


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
    reduction = Reduction(reduce_op(op, average), prescale_factor, postscale_factor)
    handle = process_set.rounds.begin(
        lambda: _requests.all_reduce([copied(tensor)], reduction), name, asynchronous=True
    )
    return handle.then(_only)


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
        name: pairs it with the operation of that name on the other ranks, whatever the order in
            which each begins its own; operations without one are paired by their order.
        op: Average (default), Sum, Min, Max or Product. The average of integers is cut off.
        prescale_factor, postscale_factor: multiply what goes in, and what comes out.
        process_set: the ranks that take part.

    Raises HorovodInternalError, on every rank, for shapes or dtypes that differ; ValueError where
    an operation of that name is under way.
    """
    reduction = Reduction(reduce_op(op, average), prescale_factor, postscale_factor)
    process_set.rounds.begin(
        lambda: _requests.all_reduce([tensor], reduction), name, asynchronous=False
    ).wait()
    return tensor


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
    reduction = Reduction(reduce_op(op, average), prescale_factor, postscale_factor)
    sent, ctx = compression.compress(tensor)
    return compression.decompress(_autograd.reduce([sent], reduction, process_set, name)[0], ctx)


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
    reduction = Reduction(reduce_op(op, average), prescale_factor, postscale_factor)
    return process_set.rounds.begin(
        lambda: _requests.all_reduce(tensors, reduction), name, asynchronous=True
    )


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    **settings: Any,
) -> Handle:
    """Begin `grouped_allreduce` without a gradient; arguments as there."""
    own = [copied(tensor) for tensor in tensors]
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
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors at once, small ones in one buffer; arguments as there."""
    reduction = Reduction(reduce_op(op, average), prescale_factor, postscale_factor)
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    reduced = _autograd.reduce(sent, reduction, process_set, name)
    return _decompressed(compression, reduced, compressed)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin the sum or average of sparse COO tensors; the handle, called, returns a sparse one.

    The ranks' indices and values are gathered: every rank may have its own number of them.
    """
    chosen = reduce_op(op)
    if chosen not in (ReduceOp.Average, ReduceOp.Sum):
        raise ValueError(f"op={chosen.name} of sparse tensors is not supported")
    own = tensor.detach().coalesce()
    gathered = grouped_allgather_async([own.indices().t(), own.values()], name, process_set)

    def finish(parts: list[torch.Tensor]) -> torch.Tensor:
        indices, values = parts
        summed = torch.sparse_coo_tensor(
            indices.t(), values, own.shape, device=own.device, check_invariants=False
        ).coalesce()
        return summed / process_set.group.size() if chosen is ReduceOp.Average else summed

    return gathered.then(finish)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin `allgather` without a gradient; `synchronize(handle)` returns the rows of all."""
    own = tensor.detach()
    handle = process_set.rounds.begin(lambda: _requests.all_gather(own), name, asynchronous=True)
    return handle.then(_only)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in which they may differ.

    The gradient is averaged over the ranks, and each takes its own rows of it.

    Raises HorovodInternalError, on every rank, for other shapes or dtypes that differ.
    """
    return _autograd.gather([tensor], process_set, name)[0]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `grouped_allgather` without a gradient."""
    names = names_of_parts(name, len(tensors))
    handles = [
        allgather_async(tensor, part, process_set)
        for tensor, part in zip(tensors, names, strict=True)
    ]
    return Handle(handles, lambda: [handle.wait() for handle in handles])


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allgather` of several tensors."""
    return list(_autograd.gather(tensors, process_set, name))


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `broadcast_`; `synchronize(handle)` returns the tensor."""
    handle = process_set.rounds.begin(
        lambda: _requests.broadcast([tensor], root_rank, process_set), name, asynchronous=True
    )
    return handle.then(_only)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `broadcast` without a gradient; `synchronize(handle)` returns the new tensor."""
    handle = process_set.rounds.begin(
        lambda: _requests.broadcast([copied(tensor)], root_rank, process_set),
        name,
        asynchronous=True,
    )
    return handle.then(_only)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Give every rank the values of the root, a global rank also with a process set; in place."""
    process_set.rounds.begin(
        lambda: _requests.broadcast([tensor], root_rank, process_set), name, asynchronous=False
    ).wait()
    return tensor


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
    """Begin `alltoall` without a gradient.

    `synchronize(handle)` returns the rows and how many came from each rank, also without `splits`.
    """
    own = tensor.detach()
    handle = process_set.rounds.begin(
        lambda: _requests.all_to_all(own, splits, process_set), name, asynchronous=True
    )
    return handle.then(lambda result: (result[0], _counts(result[1], splits)))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows to each rank, and receive rows from each.

    Args:
        tensor: its rows go to the ranks in order; shapes are equal beyond the first dimension.
        splits: how many rows go to each rank, whole numbers; None: equally many.
        name, process_set: as in `allreduce_`.

    Returns the rows received; with `splits` also how many came from each rank, an int32 tensor.

    Raises ValueError for splits that don't fit the tensor, HorovodInternalError on the others.
    """
    rows, counts = _autograd.exchange(tensor, splits, process_set, name)
    return rows if splits is None else (rows, _counts(counts, splits))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin `reducescatter` without a gradient; `synchronize(handle)` returns this rank's rows."""
    own = tensor.detach()
    reduction = Reduction(reduce_op(op), prescale_factor, postscale_factor)
    return process_set.rounds.begin(
        lambda: _requests.reduce_scatter(own, reduction), name, asynchronous=True
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    **factors: float,
) -> torch.Tensor:
    """Reduce over the ranks; each keeps its share of the rows, the first ones one more if uneven.

    Args:
        tensor: the same shape and dtype on every rank.
        name: as in `allreduce_`.
        compression: a class of `Compression`.
        op: Average or Sum.
        process_set: the ranks that take part.
        **factors: prescale_factor, postscale_factor, as in `allreduce_`.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, **factors)[0]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    **factors: float,
) -> Handle:
    """Begin `grouped_reducescatter` without a gradient."""
    names = names_of_parts(name, len(tensors))
    handles = [
        reducescatter_async(tensor, part, op, process_set, **factors)
        for tensor, part in zip(tensors, names, strict=True)
    ]
    return Handle(handles, lambda: [handle.wait() for handle in handles])


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors; arguments as there."""
    reduction = Reduction(reduce_op(op), prescale_factor, postscale_factor)
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    scattered = _autograd.scatter(sent, reduction, process_set, name)
    return _decompressed(compression, scattered, compressed)


def join(device: int = -1) -> int:
    """Say that this rank has no more batches; returns when every rank has said so.

    Until then it takes part in what the others do over all ranks: it adds zeros to an allreduce and
    no rows to an allgather. An average still divides by the number of all ranks. A broadcast from
    it is an error on the others.

    Args:
        device: ignored, there for scripts that give it.

    Returns the rank that joined last.
    """
    del device
    return _collectives.join()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Not supported: raises IntegrationError."""
    raise no_such_feature("the timeline", "use torch.profiler, and print(deepytorch.report())")


def stop_timeline() -> None:
    """Not supported: raises IntegrationError."""
    raise no_such_feature("the timeline", "use torch.profiler, and print(deepytorch.report())")


def _only(results: Sequence[torch.Tensor]) -> torch.Tensor:
    return results[0]


def _decompressed(
    compression: type[Compressor],
    results: Sequence[torch.Tensor],
    compressed: Sequence[tuple[torch.Tensor, Any]],
) -> list[torch.Tensor]:
    return [
        compression.decompress(result, ctx)
        for result, (_, ctx) in zip(results, compressed, strict=True)
    ]


def _counts(counts: Sequence[int], splits: torch.Tensor | Sequence[int] | None) -> torch.Tensor:
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
    return torch.tensor(counts, dtype=torch.int32, device=device)
