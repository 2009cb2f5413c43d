"""Triton kernel of `fused_adam`: a program updates one chunk of one tensor.

Triton evaluates annotations of a kernel's arguments; floats without one have 32 bits.

NOTE [Arithmetic]. torch computes in float32, but for products with its settings: these are float64,
and what such an expression gives is rounded to float32 once. `IS_WIDE` does the same, with
multiplications and additions rounded as one where nvcc does that to torch's. A GPU converts between
the two formats slowly, and parameters of 16 bits then wait for that instead of memory. The other
way stays in float32, with each setting as the sum of two: what it gives is off by a part of a
float32's last bit, which rounding to 16 bits hides but in about one of a million elements.

NOTE [Roots and quotients]. Both ways round them as IEEE 754 says, as torch's do, by one step of
Newton's method and a remainder from `fma`. They lack the branches for a float32's extremes: below
about 1e-30 they are off, which a usual eps hides. Calls with a smaller one are torch's, see
`fused_adam.LEAST_EPS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TYPES: Mapping[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@dataclass(frozen=True)
class Shape:
    """How the work is cut up.

    Attributes:
        chunk: elements of a program, a multiple of `block`, which is one of 16.
        block: elements at a time.
        num_warps: of a program.
    """

    chunk: int = 16384
    block: int = 1024
    num_warps: int = 4


@triton.jit
def _wide(x):  # type: ignore[no-untyped-def]
    """Return an argument as a float64, which Triton's interpreter has as Python's float."""
    return tl.full((), x, tl.float64)


@triton.jit
def _split(x):  # type: ignore[no-untyped-def]
    """Return a float64 as the sum of two float32."""
    high = x.to(tl.float32)
    return high, (x - high.to(tl.float64)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _decayed(x, rate, IS_WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute x - rate x."""
    if IS_WIDE:
        wide = x.to(tl.float64)
        result = tl.fma(-rate, wide, wide).to(tl.float32)
    else:
        kept, rest = _split(1.0 - rate)
        result = tl.fma(x, kept, x * rest)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _averaged(  # type: ignore[no-untyped-def]
    average, x, beta, IS_SQUARE: tl.constexpr, IS_WIDE: tl.constexpr
):
    """Compute beta average + (1 - beta) x, or x squared."""
    if IS_WIDE:
        wide = x.to(tl.float64)
        new = (1.0 - beta) * wide
        if IS_SQUARE:
            new = new * wide
        result = tl.fma(beta, average.to(tl.float64), new).to(tl.float32)
    else:
        kept, kept_rest = _split(beta)
        share, share_rest = _split(1.0 - beta)
        new = x
        if IS_SQUARE:
            new = x * x
        new = tl.fma(new, share, tl.fma(new, share_rest, average * kept_rest))
        result = tl.fma(average, kept, new)
    return result


@triton.jit
def _root(x):  # type: ignore[no-untyped-def]
    """Return the square root of what is not negative."""
    inverse = tl.rsqrt(x)
    root = x * inverse
    root = tl.fma(tl.fma(-root, root, x), 0.5 * inverse, root)
    # Zero and infinity come out as no number.
    return tl.where(root == root, root, x)


@triton.jit
def _quotient(x, y):  # type: ignore[no-untyped-def]
    """Divide x by y."""
    inverse = 1.0 / y
    plain = x * inverse
    inverse = tl.fma(tl.fma(-y, inverse, 1.0), inverse, inverse)
    quotient = x * inverse
    quotient = tl.fma(tl.fma(-quotient, y, x), inverse, quotient)
    return tl.where(quotient == quotient, quotient, plain)


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    parameter,
    gradient,
    first,
    second,
    settings,
    corrections,
    grad_scale,
    IS_DECOUPLED: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    IS_MAXIMIZED: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Return the new parameter, gradient without its scale, and moments, all float32."""
    lr, beta1, beta2, weight_decay, eps = settings
    step_size, root, reciprocal = corrections
    if grad_scale is not None:
        scale = tl.load(grad_scale).to(tl.float64)
        gradient = (gradient.to(tl.float64) / scale).to(tl.float32)
    ascent = gradient
    if IS_MAXIMIZED:
        ascent = -gradient
    if HAS_DECAY:
        if IS_DECOUPLED:
            parameter = _decayed(parameter, lr * weight_decay, IS_WIDE)
        elif IS_WIDE:
            sum = tl.fma(parameter.to(tl.float64), weight_decay, ascent.to(tl.float64))
            ascent = sum.to(tl.float32)
        else:
            decay, rest = _split(weight_decay)
            ascent = tl.fma(parameter, decay, tl.fma(parameter, rest, ascent))
    first = _averaged(first, ascent, beta1, False, IS_WIDE)
    second = _averaged(second, ascent, beta2, True, IS_WIDE)
    # One division serves all elements; the remainder makes it what dividing each would give.
    size = _root(second)
    quotient = size * reciprocal
    remainder = tl.fma(-quotient, root, size)
    quotient = tl.where(size < float("inf"), tl.fma(remainder, reciprocal, quotient), size)
    if IS_WIDE:
        divisor = (quotient.to(tl.float64) + eps).to(tl.float32)
    else:
        divisor = quotient + eps.to(tl.float32)
    parameter = parameter - _quotient(step_size * first, divisor)
    return parameter, gradient, first, second


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    places,
    chunks,
    chunk,
    lr_place,
    found_inf,
    grad_scale,
    lr: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    log_beta1: tl.float64,
    log_beta2: tl.float64,
    weight_decay: tl.float64,
    eps: tl.float64,
    TYPE: tl.constexpr,
    IS_DECOUPLED: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    IS_MAXIMIZED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = places + tl.load(chunks + 2 * program).to(tl.int64) * 7
    first_element = tl.load(chunks + 2 * program + 1).to(tl.int64) * chunk
    # What is passed is an address, so the table has no types.
    parameters = tl.load(row)
    gradients = tl.load(row + 1)
    firsts = tl.load(row + 2)
    seconds = tl.load(row + 3)
    step = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32))).to(tl.float64)
    size = tl.load(row + 5)
    is_aligned = tl.load(row + 6) != 0
    if found_inf is not None:
        size = tl.where(tl.load(found_inf) == 1.0, 0, size)
    rate = _wide(lr)
    if lr_place is not None:
        rate = tl.load(lr_place).to(tl.float64)
    settings = (rate, _wide(beta1), _wide(beta2), _wide(weight_decay), _wide(eps))
    correction = (1.0 - tl.exp2(step * _wide(log_beta1))).to(tl.float32)
    root = tl.sqrt(1.0 - tl.exp2(step * _wide(log_beta2))).to(tl.float32)
    step_size = (rate / correction.to(tl.float64)).to(tl.float32)
    corrections = (step_size, root, tl.div_rn(1.0, root))
    end = tl.minimum(first_element + chunk, size)
    for begin in range(first_element, end, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        if is_aligned & (begin + BLOCK <= size):
            # Sixteen bytes at a time.
            p_at = tl.multiple_of(parameters.to(tl.pointer_type(TYPE)), 16) + offsets
            g_at = tl.multiple_of(gradients.to(tl.pointer_type(TYPE)), 16) + offsets
            m_at = tl.multiple_of(firsts.to(tl.pointer_type(TYPE)), 16) + offsets
            v_at = tl.multiple_of(seconds.to(tl.pointer_type(TYPE)), 16) + offsets
            p, g, m, v = _update(
                tl.load(p_at).to(tl.float32),
                tl.load(g_at).to(tl.float32),
                tl.load(m_at).to(tl.float32),
                tl.load(v_at).to(tl.float32),
                settings,
                corrections,
                grad_scale,
                IS_DECOUPLED,
                HAS_DECAY,
                IS_MAXIMIZED,
                IS_WIDE,
            )
            tl.store(p_at, p.to(TYPE))
            tl.store(m_at, m.to(TYPE))
            tl.store(v_at, v.to(TYPE))
            if grad_scale is not None:
                tl.store(g_at, g.to(TYPE))
        else:
            is_inside = offsets < size
            p_at = parameters.to(tl.pointer_type(TYPE)) + offsets
            g_at = gradients.to(tl.pointer_type(TYPE)) + offsets
            m_at = firsts.to(tl.pointer_type(TYPE)) + offsets
            v_at = seconds.to(tl.pointer_type(TYPE)) + offsets
            p, g, m, v = _update(
                tl.load(p_at, mask=is_inside, other=0.0).to(tl.float32),
                tl.load(g_at, mask=is_inside, other=0.0).to(tl.float32),
                tl.load(m_at, mask=is_inside, other=0.0).to(tl.float32),
                tl.load(v_at, mask=is_inside, other=0.0).to(tl.float32),
                settings,
                corrections,
                grad_scale,
                IS_DECOUPLED,
                HAS_DECAY,
                IS_MAXIMIZED,
                IS_WIDE,
            )
            tl.store(p_at, p.to(TYPE), mask=is_inside)
            tl.store(m_at, m.to(TYPE), mask=is_inside)
            tl.store(v_at, v.to(TYPE), mask=is_inside)
            if grad_scale is not None:
                tl.store(g_at, g.to(TYPE), mask=is_inside)


def launch(
    places: Tensor,
    chunks: Tensor,
    dtype: torch.dtype,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
    is_decoupled: bool,
    is_maximized: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    is_wide: bool,
    shape: Shape,
) -> None:
    """Update what a table says, on the current device and stream.

    Args:
        places: int64, (tensors, 7) on the device: addresses of parameter, gradient, first and
            second moment and of the number of steps, elements, and whether the first four are
            multiples of 16.
        chunks: int32, (chunks, 2) on the device: the row of `places`, and which chunk of it.
        dtype: of all but the numbers of steps, which are float32.
        lr: or a float32 tensor on the device, as the next two are, of one element each.
        betas: the moments' decays.
        weight_decay: of AdamW if `is_decoupled`, else of Adam.
        eps: see `torch.optim.Adam`.
        is_decoupled: see above.
        is_maximized: as `maximize` of `torch.optim.Adam`.
        grad_scale: gradients are divided by it, and written.
        found_inf: nothing is done where it is 1.
        is_wide: see NOTE [Arithmetic].
        shape: `chunks` has been made with its chunk.
    """
    is_tensor = isinstance(lr, Tensor)
    _step[(len(chunks),)](
        places,
        chunks,
        shape.chunk,
        lr if is_tensor else None,
        found_inf,
        grad_scale,
        0.0 if is_tensor else lr,
        *betas,
        *map(_log2, betas),
        weight_decay,
        eps,
        TYPE=_TYPES[dtype],
        IS_DECOUPLED=is_decoupled,
        HAS_DECAY=weight_decay != 0.0,
        IS_MAXIMIZED=is_maximized,
        IS_WIDE=is_wide,
        BLOCK=shape.block,
        num_warps=shape.num_warps,
    )


def _log2(beta: float) -> float:
    return math.log2(beta) if beta else -math.inf
