"""Triton kernels of `grouped_mm`: products of groups whose sizes only the GPU knows.

A launch has as many programs as there could be tiles. Each finds its own from where groups end, and
one without a tile does nothing.

Triton evaluates annotations of a kernel's arguments, so only constants have one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_IEEE, _TF32 = "ieee", "tf32"
# The longest side of a tile. Exact products of float32 keep more in registers.
_MOST_EXACT, _MOST = 64, 128


@triton.jit  # type: ignore[untyped-decorator]
def _by_rows(  # type: ignore[no-untyped-def]
    left,
    right,
    ends,
    out,
    num_groups,
    num_rows,
    inner,
    columns,
    left_row,
    left_inner,
    right_group,
    right_inner,
    right_column,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # The rows behind the last group are one more, of zeros.
    group = tl.arange(0, GROUPS)
    end = tl.load(ends + group, mask=group < num_groups, other=num_rows)
    begin = tl.load(ends + group - 1, mask=(group > 0) & (group <= num_groups), other=num_rows)
    begin = tl.where(group == 0, 0, begin)
    tiles = (end - begin + ROWS - 1) // ROWS
    tiles_to = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    own = tl.sum((tiles_to <= tile).to(tl.int32), 0)
    if own > num_groups:
        return
    is_own = group == own
    first = tl.sum(tl.where(is_own, begin + (tile - tiles_to + tiles) * ROWS, 0), 0)
    last = tl.sum(tl.where(is_own, end, 0), 0)
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, INNER)
    is_row, is_column = row < last, column < columns
    row = row.to(tl.int64)  # rows times columns may pass 2**31
    lefts = left + row[:, None] * left_row + at[None, :] * left_inner
    rights = right + own.to(tl.int64) * right_group
    rights += at[:, None] * right_inner + column.to(tl.int64)[None, :] * right_column
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begun in range(0, tl.where(own < num_groups, inner, 0), INNER):
        is_inner = at < inner - begun
        a = tl.load(lefts, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        b = tl.load(rights, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        lefts += INNER * left_inner
        rights += INNER * right_inner
    place = out + row[:, None] * columns + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _by_groups(  # type: ignore[no-untyped-def]
    left,
    right,
    ends,
    out,
    height,
    width,
    left_row,
    left_column,
    right_row,
    right_column,
    out_group,
    out_row,
    out_column,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    group = tl.program_id(1)
    across = tl.cdiv(width, WIDTH)
    row = (tl.program_id(0) // across) * HEIGHT + tl.arange(0, HEIGHT)
    column = (tl.program_id(0) % across) * WIDTH + tl.arange(0, WIDTH)
    is_row, is_column = row < height, column < width
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    row, column = row.to(tl.int64), column.to(tl.int64)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for begun in range(begin, end, INNER):
        at = begun + tl.arange(0, INNER)
        is_inner = at < end
        at = at.to(tl.int64)
        lefts = left + row[:, None] * left_column + at[None, :] * left_row
        rights = right + at[:, None] * right_row + column[None, :] * right_column
        a = tl.load(lefts, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        b = tl.load(rights, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = out + group.to(tl.int64) * out_group
    place += row[:, None] * out_row + column[None, :] * out_column
    mask = is_row[:, None] & is_column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


def by_rows(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Each group's rows of `left` times its matrix of `right`; zeros behind the last group.

    Args:
        left: (rows, inner), in groups.
        right: (groups, inner, columns), of the same dtype.
        ends: (groups,), int32: the row behind each group; does not fall.

    Returns (rows, columns) of that dtype, summed in float32.
    """
    (rows, inner), (groups, _, columns) = left.shape, right.shape
    out = torch.empty((rows, columns), dtype=left.dtype, device=left.device)
    if not out.numel():
        return out
    precision = _precision(left)
    high, wide = _side(rows / groups, precision), _side(columns, precision)
    with torch.cuda.device(out.device):
        _by_rows[(rows // high + groups + 1, triton.cdiv(columns, wide))](
            left,
            right,
            ends,
            out,
            groups,
            rows,
            inner,
            columns,
            *left.stride(),
            *right.stride(),
            GROUPS=triton.next_power_of_2(groups + 1),
            ROWS=high,
            COLUMNS=wide,
            **_depth(left, precision, high * wide),
        )
    return out


def by_groups(left: Tensor, right: Tensor, ends: Tensor, *, is_transposed: bool = False) -> Tensor:
    """Each group's rows of `left`, transposed, times its rows of `right`.

    Args:
        left: (rows, height), in groups.
        right: (rows, width), in the same groups, of the same dtype.
        ends: (groups,), int32: the row behind each group; does not fall.
        is_transposed: whether the result's matrices lie in memory column by column.

    Returns (groups, height, width) of that dtype, summed in float32; zeros for empty groups.
    """
    height, width, groups = left.shape[1], right.shape[1], len(ends)
    shape = (groups, width, height) if is_transposed else (groups, height, width)
    out = torch.empty(shape, dtype=left.dtype, device=left.device)
    out = out.mT if is_transposed else out
    if not out.numel():
        return out
    precision = _precision(left)
    high, wide = _side(height, precision), _side(width, precision)
    with torch.cuda.device(out.device):
        _by_groups[(triton.cdiv(height, high) * triton.cdiv(width, wide), groups)](
            left,
            right,
            ends,
            out,
            height,
            width,
            *left.stride(),
            *right.stride(),
            *out.stride(),
            HEIGHT=high,
            WIDTH=wide,
            **_depth(left, precision, high * wide),
        )
    return out


def _precision(left: Tensor) -> str:
    """How exact products of float32 are: as torch's own on this GPU. Others always are."""
    settings = torch.backends.cuda.matmul
    if left.dtype != torch.float32:
        return _TF32
    if hasattr(settings, "fp32_precision"):
        return _TF32 if settings.fp32_precision == _TF32 else _IEEE
    return _TF32 if settings.allow_tf32 else _IEEE


def _side(size: float, precision: str) -> int:
    """The side of a tile where there are `size` on average: little of it is left empty."""
    most = _MOST_EXACT if precision == _IEEE else _MOST
    side = 16  # what tensor cores take at least
    while side < min(size, most):
        side *= 2
    return side


def _depth(left: Tensor, precision: str, tile: int) -> dict[str, Any]:
    """How much of the sums is read at a time, and by how many threads."""
    num_bytes = 64 if precision == _IEEE else 128
    return {
        "INNER": num_bytes // left.element_size(),
        "PRECISION": precision,
        "num_warps": 8 if tile == _MOST * _MOST else 4,
    }
