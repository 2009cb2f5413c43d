"""Triton kernel of `fused_adam`: a program updates one chunk of one tensor.

Triton evaluates annotations of a kernel's arguments; floats without one have 32 bits.

NOTE [Arithmetic]. torch computes in float32 and rounds settings to it first; a product and what is
added to it are rounded as one, in its source or by nvcc. The kernel does the same, with each such
pair written as `fma`. Powers of the decays are read from tables that torch's own operator fills.
Triton's library has another `pow`, and in the first steps a bias correction magnifies a last bit.

NOTE [Roots and quotients]. They are rounded as IEEE 754 says, as torch's are, by one step of
Newton's method and a remainder from `fma`. They lack the branches for a float32's extremes: below
about 1e-30 they are off, which a usual eps hides. Calls with a smaller one are torch's, see
`fused_adam.LEAST_EPS`.
"""

from __future__ import annotations

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
class LaunchShape:
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
def _float32(x):  # type: ignore[no-untyped-def]
    """Return an argument as a float32, which Triton's interpreter has as Python's float."""
    return tl.full((), x, tl.float32)


@triton.jit
def _averaged(average, x, beta):  # type: ignore[no-untyped-def]
    """Compute beta average + (1 - beta) x."""
    return tl.fma(beta, average, tl.fma(-beta, x, x))


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
):
    """Return the new parameter, gradient without its scale, and moments, all float32."""
    lr, beta1, beta2, weight_decay, eps = settings
    step_size, root, reciprocal = corrections
    if grad_scale is not None:
        gradient = tl.div_rn(gradient, tl.load(grad_scale))
    ascent = gradient
    if IS_MAXIMIZED:
        ascent = -gradient
    if HAS_DECAY:
        if IS_DECOUPLED:
            parameter = tl.fma(-(lr * weight_decay), parameter, parameter)
        else:
            ascent = tl.fma(parameter, weight_decay, ascent)
    first = _averaged(first, ascent, beta1)
    second = _averaged(second, ascent * ascent, beta2)
    # One division serves all elements; the remainder makes it what dividing each would give.
    size = _root(second)
    quotient = size * reciprocal
    remainder = tl.fma(-quotient, root, size)
    quotient = tl.where(size < float("inf"), tl.fma(remainder, reciprocal, quotient), size)
    parameter = parameter - _quotient(step_size * first, quotient + eps)
    return parameter, gradient, first, second


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    places,
    chunks,
    chunk,
    lr_place,
    found_inf,
    grad_scale,
    corrections1,
    corrections2,
    last1,
    last2,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    TYPE: tl.constexpr,
    IS_DECOUPLED: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    IS_MAXIMIZED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = places + tl.load(chunks + 2 * program).to(tl.int64) * 6
    first_element = tl.load(chunks + 2 * program + 1).to(tl.int64) * chunk
    # The table has addresses, not tensors, so it has no types.
    parameters = tl.load(row)
    firsts = tl.load(row + 1)
    seconds = tl.load(row + 2)
    step = tl.load(tl.load(row + 3).to(tl.pointer_type(tl.float32)))
    gradients = tl.load(row + 4)
    size = tl.load(row + 5)
    is_aligned = ((parameters | firsts | seconds | gradients) & 15) == 0
    if found_inf is not None:
        size = tl.where(tl.load(found_inf) == 1.0, 0, size)
    rate = _float32(lr)
    if lr_place is not None:
        rate = tl.load(lr_place)
    settings = (rate, _float32(beta1), _float32(beta2), _float32(weight_decay), _float32(eps))
    # Corrections stay what they are after the last.
    step = tl.maximum(step, 0.0)
    correction = tl.load(corrections1 + tl.minimum(step, last1).to(tl.int32))
    root = tl.sqrt_rn(tl.load(corrections2 + tl.minimum(step, last2).to(tl.int32)))
    corrections = (tl.div_rn(rate, correction), root, tl.div_rn(1.0, root))
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
    corrections: tuple[Tensor, Tensor],
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
    is_decoupled: bool,
    is_maximized: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    shape: LaunchShape,
) -> None:
    """Update what a table says, on the current device and stream.

    Args:
        places: int64, (tensors, 6) on the device: addresses of parameter, first and second moment,
            number of steps and gradient, and the elements of each.
        chunks: int32, (chunks, 2) on the device: the row of `places`, and which chunk of it.
        dtype: of all but the numbers of steps, which are whole ones in float32.
        corrections: 1 - beta**step of either beta, float32 on the device, from step 0 on to one
            where that is 1.
        lr: or a float32 tensor on the device, as the next two are, of one element each.
        betas: the moments' decays.
        weight_decay: of AdamW if `is_decoupled`, else of Adam.
        eps: see `torch.optim.Adam`.
        is_decoupled: see above.
        is_maximized: as `maximize` of `torch.optim.Adam`.
        grad_scale: gradients are divided by it, and written.
        found_inf: nothing is done where it is 1.
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
        *corrections,
        # As floats: integers would be compiled in if they are 1 or multiples of 16.
        *(len(correction) - 1.0 for correction in corrections),
        0.0 if is_tensor else lr,
        *betas,
        weight_decay,
        eps,
        TYPE=_TYPES[dtype],
        IS_DECOUPLED=is_decoupled,
        HAS_DECAY=weight_decay != 0.0,
        IS_MAXIMIZED=is_maximized,
        BLOCK=shape.block,
        num_warps=shape.num_warps,
    )
