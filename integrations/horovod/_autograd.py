"""The gradients of the collectives, as Horovod defines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepytorch.integrations._horovod_common import ReduceOp

from . import _collectives, _ops
from ._world import ProcessSet, global_process_set, rank


def symmetric(reduce: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """`reduce(*tensors)`, whose gradient is `reduce` of the gradients."""
    return _Symmetric.apply(reduce, *tensors)  # type: ignore[no-untyped-call]


class _Symmetric(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduce: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.reduce = reduce
        return reduce(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        reduced = symmetric(ctx.reduce, *grads)
        return (None, reduced) if isinstance(reduced, torch.Tensor) else (None, *reduced)


def gather(tensor: torch.Tensor, process_set: ProcessSet, name: str | None) -> torch.Tensor:
    """All ranks' rows; the gradient is averaged, each rank takes its rows."""
    result: torch.Tensor = _Gather.apply(tensor, process_set, name)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, process_set: ProcessSet, name: str | None
    ) -> torch.Tensor:
        output, rows = _collectives.all_gather(
            tensor, process_set, asynchronous=False, name=name
        ).wait()
        ctx.process_set, ctx.rows = process_set, rows
        result: torch.Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        averaged = _ops.allreduce(grad, op=ReduceOp.Average, process_set=ctx.process_set)
        return torch.split(averaged, ctx.rows)[ctx.process_set.group.rank()], None, None


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
        result: torch.Tensor = _ops.broadcast_async(tensor, root_rank, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        averaged = _ops.allreduce(grad, op=ReduceOp.Average, process_set=ctx.process_set)
        own = averaged if rank() == ctx.root_rank else torch.zeros_like(averaged)
        return own, None, None, None


def exchange(
    tensor: torch.Tensor, splits: list[int] | None, process_set: ProcessSet, name: str | None
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
        output, counts = _collectives.all_to_all(
            tensor, sent, process_set, asynchronous=False, name=name
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
    tensor: torch.Tensor, op: ReduceOp, name: str | None, settings: dict[str, Any]
) -> torch.Tensor:
    """This rank's rows of the reduced tensor; the gradient is gathered from all."""
    result: torch.Tensor = _Scatter.apply(  # type: ignore[no-untyped-call]
        tensor, op, name, settings
    )
    return result


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: ReduceOp, name: str | None, settings: dict[str, Any]
    ) -> torch.Tensor:
        ctx.op, ctx.settings = op, settings
        result: torch.Tensor = _ops.reducescatter_async(tensor, name, op, **settings).wait()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        process_set: ProcessSet = ctx.settings.get("process_set", global_process_set)
        # Horovod's convention: the loss is the average over the ranks.
        factor = ctx.settings.get("prescale_factor", 1.0)
        factor *= ctx.settings.get("postscale_factor", 1.0)
        if ctx.op is ReduceOp.Sum:
            factor *= process_set.group.size()
        return gather(grad * factor, process_set, None), None, None, None
