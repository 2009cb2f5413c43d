"""Cross-entropy in one pass over the logits forward, and one backward.

Torch computes it of log-probabilities. Under autocast these are stored in the logits' dtype and
once more in float32, as are the gradients of both. Here the forward pass keeps a number for each
row, the logarithm of its sum of exponentials. One pass finds it (Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv:1805.02867). The backward pass writes the logits'
gradient from that number. Sums are in float32 whatever the logits are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor, *, is_mean: bool, ignore_index: int) -> Tensor:
    """The loss of `torch.nn.functional.cross_entropy`, on a GPU.

    Args:
        logits: (rows, classes), of any floating dtype up to float32; classes lie side by side.
        targets: (rows,), int64; on a GPU one that is no class ends the process, as in torch.
        is_mean: whether the sum over rows is divided by the number of those that count.
        ignore_index: the target of rows that don't count.

    Returns a float32 scalar, differentiable any number of times.
    """
    apply: Any = _CrossEntropy.apply
    loss: Tensor = apply(logits, targets, is_mean, ignore_index)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, is_mean: bool, ignore_index: int
    ) -> Tensor:
        from deepytorch_core.nn import cross_entropy_kernels

        losses, normalizers = cross_entropy_kernels.forward(logits, targets, ignore_index)
        counts = targets != ignore_index
        is_class = (targets >= 0) & (targets < logits.shape[1])
        torch._assert_async((is_class | ~counts).all(), "cross_entropy: a target is no class")
        divisor = counts.sum() if is_mean else losses.new_ones(())
        ctx.ignore_index = ignore_index
        ctx.save_for_backward(logits, targets, normalizers, divisor)
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, normalizers, divisor = ctx.saved_tensors
        scale = upstream[0] / divisor
        if torch.is_grad_enabled():  # to be differentiated again
            gradient = _differentiable(logits, targets, scale, ctx.ignore_index)
        else:
            from deepytorch_core.nn import cross_entropy_kernels

            gradient = cross_entropy_kernels.backward(
                logits, targets, normalizers, scale, ignore_index=ctx.ignore_index
            )
        return gradient, None, None, None


def _differentiable(logits: Tensor, targets: Tensor, scale: Tensor, ignore_index: int) -> Tensor:
    counts = targets != ignore_index
    chosen = torch.nn.functional.one_hot(torch.where(counts, targets, 0), logits.shape[1])
    probabilities = torch.softmax(logits, 1, dtype=torch.float32)
    gradient = torch.where(counts[:, None], (probabilities - chosen) * scale, 0.0)
    return gradient.to(logits.dtype)
