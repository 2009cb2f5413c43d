"""Products of groups of rows, each with a matrix of its own, that don't wait for the GPU.

The rows of a mixture of experts come sorted by expert, and only the GPU knows how many each has.
`torch._grouped_mm` has kernels that read that there for bfloat16 on some GPUs. For all else it
reads it back and multiplies group by group, so the CPU waits in each layer, once forward and twice
backward. These products are the same, up to the order of sums, in one launch each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows of `left` with its matrix of `right`, on a GPU.

    Args:
        left: (rows, inner), of a floating dtype up to float32; groups lie one after the other.
        right: (groups, inner, columns), of the same dtype.
        ends: (groups,), int32, the row behind each group, as `offs` of `torch._grouped_mm`.

    Returns (rows, columns) of that dtype, differentiable any number of times; rows behind the last
    group are zeros.
    """
    apply: Any = _ByRows.apply
    product: Tensor = apply(left, right, ends)
    return product


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        from deepytorch_core.nn import grouped_mm_kernels

        ctx.save_for_backward(left, right, ends)
        return grouped_mm_kernels.by_rows(left, right, ends)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        left, right, ends = ctx.saved_tensors
        by_rows: Any = _ByRows.apply
        by_groups: Any = _ByGroups.apply
        for_left, for_right, _ = ctx.needs_input_grad
        # A weight's gradient lies as the weight does, or it would be copied.
        is_transposed = right.stride(-2) == 1
        return (
            by_rows(upstream[0], right.mT, ends) if for_left else None,
            by_groups(left, upstream[0], ends, is_transposed) if for_right else None,
            None,
        )


class _ByGroups(torch.autograd.Function):
    """Each group's rows of one, transposed, times its rows of the other."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, ends: Tensor, is_transposed: bool) -> Tensor:
        from deepytorch_core.nn import grouped_mm_kernels

        ctx.save_for_backward(left, right, ends)
        return grouped_mm_kernels.by_groups(left, right, ends, is_transposed=is_transposed)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        left, right, ends = ctx.saved_tensors
        by_rows: Any = _ByRows.apply
        for_left, for_right, *_ = ctx.needs_input_grad
        return (
            by_rows(right, upstream[0].mT, ends) if for_left else None,
            by_rows(left, upstream[0], ends) if for_right else None,
            None,
            None,
        )
