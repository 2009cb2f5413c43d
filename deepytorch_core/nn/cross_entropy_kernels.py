"""Triton kernels of `cross_entropy`; one program has one row of logits.

Triton evaluates annotations of a kernel's arguments, so only constants have one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # classes at a time
_NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    normalizers,
    stride,
    num_classes,
    ignored,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # rows times classes may pass 2**31
    target = tl.load(targets + row)
    begin = logits + row * stride
    largest = -float("inf")
    total = 0.0
    for first in range(0, num_classes, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(begin + columns, mask=columns < num_classes, other=-float("inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        # A block of classes that are all masked out by -inf must not make it no number.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = larger
    normalizer = largest + tl.log(total)
    counts = target != ignored
    is_class = (target >= 0) & (target < num_classes)
    x = tl.load(begin + target, mask=counts & is_class, other=0.0).to(tl.float32)
    tl.store(normalizers + row, normalizer)
    tl.store(losses + row, tl.where(counts, normalizer - x, 0.0))


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    logits,
    targets,
    normalizers,
    scale,
    gradients,
    stride,
    num_classes,
    ignored,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    is_inside = columns < num_classes
    target = tl.load(targets + row)
    place = gradients + row * num_classes + columns
    if target == ignored:
        tl.store(place, tl.zeros([BLOCK], gradients.dtype.element_ty), mask=is_inside)
    else:
        x = tl.load(logits + row * stride + columns, mask=is_inside, other=0.0).to(tl.float32)
        probability = tl.exp(x - tl.load(normalizers + row))
        gradient = (probability - tl.where(columns == target, 1.0, 0.0)) * tl.load(scale)
        tl.store(place, gradient.to(gradients.dtype.element_ty), mask=is_inside)


def forward(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Each row's loss, zero where it does not count, and its log-sum-exp; both float32, (rows,)."""
    rows, classes = logits.shape
    losses, normalizers = torch.empty((2, rows), dtype=torch.float32, device=logits.device).unbind()
    with torch.cuda.device(logits.device):
        _forward[(rows,)](
            logits,
            targets,
            losses,
            normalizers,
            logits.stride(0),
            classes,
            ignore_index,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return losses, normalizers


def backward(
    logits: Tensor, targets: Tensor, normalizers: Tensor, scale: Tensor, *, ignore_index: int
) -> Tensor:
    """The gradient to `logits`, (rows, classes) of their dtype; `scale` is a float32 scalar."""
    rows, classes = logits.shape
    gradients = torch.empty((rows, classes), dtype=logits.dtype, device=logits.device)
    with torch.cuda.device(logits.device):
        _backward[(rows, triton.cdiv(classes, _BLOCK))](
            logits,
            targets,
            normalizers,
            scale,
            gradients,
            logits.stride(0),
            classes,
            ignore_index,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return gradients
