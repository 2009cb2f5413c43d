"""The operations with their gradients, as Horovod defines them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from deepytorch.integrations.common.horovod_common import ReduceOp

from . import _requests
from ._collectives import Reduction
from ._requests import copied, names_of_parts
from ._world import ProcessSet, rank

_Tensors = tuple[torch.Tensor, ...]
_AVERAGE = Reduction(ReduceOp.Average)


def reduce(
    tensors: Sequence[torch.Tensor], reduction: Reduction, process_set: ProcessSet, name: str | None
) -> _Tensors:
    """The reduced tensors, whose gradients are reduced alike."""
    result: _Tensors = _Reduce.apply(  # type: ignore[no-untyped-call]
        reduction, process_set, name, *tensors
    )
    return result


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        reduction: Reduction,
        process_set: ProcessSet,
        name: str | None,
        *tensors: torch.Tensor,
    ) -> _Tensors:
        ctx.reduction, ctx.process_set = reduction, process_set
        return tuple(
            process_set.rounds.begin(
                lambda: _requests.all_reduce([copied(tensor) for tensor in tensors], reduction),
                name,
                asynchronous=False,
            ).wait()
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, None, *reduce(grads, ctx.reduction, ctx.process_set, None))


def gather(tensors: Sequence[torch.Tensor], process_set: ProcessSet, name: str | None) -> _Tensors:
    """All ranks' rows; the gradients are averaged, each rank takes its rows."""
    result: _Tensors = _Gather.apply(  # type: ignore[no-untyped-call]
        process_set, name, *tensors
    )
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, process_set: ProcessSet, name: str | None, *tensors: torch.Tensor
    ) -> _Tensors:
        names = names_of_parts(name, len(tensors))
        handles = [
            process_set.rounds.begin(
                functools.partial(_requests.all_gather, tensor), part, asynchronous=False
            )
            for tensor, part in zip(tensors, names, strict=True)
        ]
        results = [handle.wait() for handle in handles]
        ctx.process_set, ctx.rows = process_set, [rows for _, rows in results]
        return tuple(output for output, _ in results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        member = ctx.process_set.group.rank()
        averaged = reduce(grads, _AVERAGE, ctx.process_set, None)
        own = [
            torch.split(grad, rows)[member] for grad, rows in zip(averaged, ctx.rows, strict=True)
        ]
        return (None, None, *own)


def broadcast(
    tensor: torch.Tensor, root_rank: int, process_set: ProcessSet, name: str | None
) -> torch.Tensor:
    """The root's values; its gradient is the average, the others' zero."""
    result: torch.Tensor = _Broadcast.apply(  # type: ignore[no-untyped-call]
        tensor, root_rank, process_set, name
    )
    return result


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, process_set: ProcessSet, name: str | None
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        (result,) = process_set.rounds.begin(
            lambda: _requests.broadcast([copied(tensor)], root_rank, process_set),
            name,
            asynchronous=False,
        ).wait()
        own: torch.Tensor = result
        return own

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (averaged,) = reduce([grad], _AVERAGE, ctx.process_set, None)
        own = averaged if rank() == ctx.root_rank else torch.zeros_like(averaged)
        return own, None, None, None


def exchange(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    process_set: ProcessSet,
    name: str | None,
) -> tuple[torch.Tensor, list[int]]:
    """Rows received and their numbers; gradients go back to where the rows came from."""
    counts: list[int] = []
    rows = _Exchange.apply(  # type: ignore[no-untyped-call]
        tensor, (splits, counts), process_set, name
    )
    return rows, counts


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, process_set: ProcessSet, name: str | None
    ) -> torch.Tensor:
        sent, received = splits
        output, counts = process_set.rounds.begin(
            lambda: _requests.all_to_all(tensor, sent, process_set), name, asynchronous=False
        ).wait()
        received.extend(counts)
        ctx.process_set, ctx.received = process_set, received
        result: torch.Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back, _ = exchange(grad, ctx.received, ctx.process_set, None)
        return back, None, None, None


def scatter(
    tensors: Sequence[torch.Tensor], reduction: Reduction, process_set: ProcessSet, name: str | None
) -> _Tensors:
    """This rank's rows of the reduced tensors; the gradients are gathered from all."""
    result: _Tensors = _Scatter.apply(  # type: ignore[no-untyped-call]
        reduction, process_set, name, *tensors
    )
    return result


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        reduction: Reduction,
        process_set: ProcessSet,
        name: str | None,
        *tensors: torch.Tensor,
    ) -> _Tensors:
        ctx.reduction, ctx.process_set = reduction, process_set
        names = names_of_parts(name, len(tensors))
        handles = [
            process_set.rounds.begin(
                functools.partial(_requests.reduce_scatter, tensor, reduction),
                part,
                asynchronous=False,
            )
            for tensor, part in zip(tensors, names, strict=True)
        ]
        return tuple(handle.wait() for handle in handles)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, before, after = ctx.reduction
        # Horovod's convention: the loss is the average over the ranks.
        factor = before * after
        if op is ReduceOp.Sum:
            factor *= ctx.process_set.group.size()
        return (None, None, None, *gather([grad * factor for grad in grads], ctx.process_set, None))
