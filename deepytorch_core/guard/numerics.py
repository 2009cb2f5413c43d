"""Whether two ways of computing gave the same, as far as their number format can tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

# The norm of the difference may be this part of that of the reference. An element may be
# WORST_ELEMENT times further off, relative to the largest: sums in another order, rounded at every
# step of a block's depth.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
WORST_ELEMENT = 5.0


# Standard deviation of what rounding to the nearest changes, in units of the last place.
UNIFORM = 12**-0.5

# How much further off than by rounding its inputs a result may be.
AMPLIFIED = 10.0


def difference(
    reference: Any,
    found: Any,
    *,
    dtype: torch.dtype | None = None,
    what: str = "output",
    sensitivity: Any = None,
    looser: float = 1.0,
    negligible: float = 0.0,
    unit: float = 1.0,
) -> str | None:
    """None if `found` equals `reference` within tolerance, else what differs and by how much.

    Args:
        reference: tensors in any nest of tuples, lists and dicts, from the stock way.
        found: the same from the candidate.
        dtype: in what the computation was done, if less exact than the tensors' own (autocast).
        what: how to call them in the answer.
        sensitivity: what the stock way gives when its inputs are off by their rounding errors; as
            much and a little more may be the difference of `found` then.
        looser: factor of the tolerance.
        negligible: norm up to which the difference of a tensor does not count.
        unit: what all values are multiples of: gradients that began with smaller ones are no closer
            to zero for that.
    """
    ours, theirs = _tensors(found), _tensors(reference)
    off = _tensors(sensitivity) if sensitivity is not None else [None] * len(theirs)
    if len(ours) != len(theirs):
        return f"{what}: {len(ours)} tensors in place of {len(theirs)}"
    for index, (a, b, c) in enumerate(zip(theirs, ours, off, strict=True)):
        name = what if len(ours) == 1 else f"{what} {index}"
        problem = _difference(a, b, (dtype, looser, negligible, unit), c)
        if problem:
            return f"{name}: {problem}"
    return None


def least_exact(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the floating-point format with the largest tolerance; None: no known one is there."""
    return max(
        (dtype for dtype in dtypes if dtype in TOLERANCES), key=TOLERANCES.__getitem__, default=None
    )


def norm(*tensors: torch.Tensor | None) -> float:
    """The Euclidean norm of all elements together, in float64; those that are no numbers left out.

    Args:
        tensors: of any shapes and floating-point dtypes.
    """
    squares = 0.0
    for tensor in tensors:
        if tensor is not None:
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            finite = tensor.detach()[torch.isfinite(tensor)]
            squares += float(torch.linalg.vector_norm(finite, dtype=wide)) ** 2
    return math.sqrt(squares)


def rounded(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, *, seed: int = 1
) -> torch.Tensor:
    """Values off by their rounding error in `dtype`, or by the last bit of their own format.

    Returns a new tensor of the same shape and dtype, without gradient. Draws from no generator in
    use.
    """
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    error = torch.finfo(tensor.dtype).eps
    if dtype is not None and torch.finfo(dtype).eps > error:
        error = torch.finfo(dtype).eps * UNIFORM
    device = tensor.device
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(tensor.shape, dtype=torch.float32, device=device, generator=generator)
    return tensor.detach() * (1 + error * noise).to(tensor.dtype)


def _tensors(nest: Any) -> list[torch.Tensor | None]:
    leaves, _ = tree_flatten(nest)
    return [leaf for leaf in leaves if leaf is None or isinstance(leaf, torch.Tensor)]


def _difference(
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    exactness: tuple[torch.dtype | None, float, float, float],
    sensitivity: torch.Tensor | None,
) -> str | None:
    dtype, looser, negligible, unit = exactness
    if a is None or b is None:
        return None if a is b else f"{_shown(b)} in place of {_shown(a)}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{_shown(b)} in place of {_shown(a)}"
    if not (a.is_floating_point() or a.is_complex()):
        return None if torch.equal(a, b) else "not equal"
    if a.numel() == 0:
        return None
    limit = looser * max(TOLERANCES.get(float_format, 1e-9) for float_format in _formats(a, dtype))
    finite, other = torch.isfinite(a), torch.isfinite(b)
    if not torch.equal(finite, other):
        counts = int((~other).sum()), int((~finite).sum())
        return (
            f"infinite or not a number in {counts[0]} of {a.numel()} places, stock's in {counts[1]}"
        )
    if not bool(finite.any()):
        return None
    error, worst = _distances(a, b, finite)
    # Numbers that cancel to zero but for rounding have no relative error.
    scale = float(a.detach()[finite].abs().max()) / unit
    if scale < torch.finfo(a.dtype).eps and worst * scale < limit * 1e-3:
        return None
    if error * norm(a.detach()[finite]) <= negligible:
        return None
    most = (limit, WORST_ELEMENT * limit)
    if sensitivity is not None and sensitivity.shape == a.shape:
        known = _distances(a, sensitivity, finite & torch.isfinite(sensitivity))
        most = (max(most[0], AMPLIFIED * known[0]), max(most[1], AMPLIFIED * known[1]))
    if error > most[0] or worst > most[1]:
        return (
            f"differs by {error:.1e} of its norm, {worst:.1e} at worst (limits {most[0]:.0e}, "
            f"{most[1]:.0e})"
        )
    return None


def _distances(a: torch.Tensor, b: torch.Tensor, where: torch.Tensor) -> tuple[float, float]:
    """Return distances of `b` from `a`: in norm and at the worst element, relative to `a`'s."""
    # A format finer than their own.
    wide = torch.float32 if a.dtype.itemsize < 4 else torch.float64
    wide = torch.complex128 if a.is_complex() else wide
    x, y = a.detach()[where].to(wide), b.detach()[where].to(wide)
    if x.numel() == 0:
        return 0.0, 0.0
    size, largest = torch.linalg.vector_norm(x), x.abs().max()
    error = torch.linalg.vector_norm(x - y) / size.clamp_min(1e-30)
    return float(error), float((x - y).abs().max() / largest.clamp_min(1e-30))


def _formats(tensor: torch.Tensor, dtype: torch.dtype | None) -> Sequence[torch.dtype]:
    real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return [real] if dtype is None else [real, dtype]


def _shown(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
