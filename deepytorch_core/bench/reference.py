"""Test data, the exact result of each collective, and how far a result may be from it.

Data is a hash of (rank, element), so every rank can work out any rank's input without talking to
it: the reference shares neither code nor messages with what it checks. Floats are odd multiples of
2^-21 to 2^-24 that use all 24 bits of a float32. So their sums must be rounded to it, and are exact
in float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

SEGMENT = 1 << 20  # elements looked at in one go, which bounds the memory of a check

_STEP = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit number
_MIX = -4658895280553007687
_RANK_STRIDE = 1 << 40
_INTEGER_BITS = {torch.int8: 4, torch.uint8: 4, torch.int32: 20, torch.int64: 40}


@dataclass(frozen=True)
class OutputPiece:
    """`count` elements of an output from `start` on: the sum of those of `sources`.

    `sources` are pairs (rank, first element in that rank's input).
    """

    start: int
    count: int
    sources: tuple[tuple[int, int], ...]


def values(
    rank: int, start: int, count: int, dtype: torch.dtype, *, device: torch.device | None = None
) -> torch.Tensor:
    """Elements [start, start + count) of `rank`'s input, of `dtype` on `device` (None: the CPU).

    The same bits on every device.
    """
    index = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device or "cpu")
    mixed = (index + rank * _RANK_STRIDE) * _STEP
    mixed ^= mixed >> 32
    mixed *= _MIX
    mixed ^= mixed >> 29
    if not dtype.is_floating_point:
        return ((mixed & ((1 << _INTEGER_BITS[dtype]) - 1)) | 1).to(dtype)
    odd = ((mixed & 0x1FFFFFF) | 1) - (1 << 24)
    # A division by a power of two is exact everywhere; torch.ldexp rounds on GPUs.
    power = 1 << (21 + ((mixed >> 40) & 3))
    return (odd.to(torch.float64) / power.to(torch.float64)).to(dtype)


def fill(target: torch.Tensor, rank: int) -> None:
    """Writes `rank`'s input into the flat tensor `target`."""
    for start in range(0, target.numel(), SEGMENT):
        part = target[start : start + SEGMENT]
        part.copy_(values(rank, start, part.numel(), target.dtype, device=target.device))


def pieces(op: str, *, rank: int, world_size: int, share: int) -> Iterator[OutputPiece]:
    """Yield what `rank`'s output must hold after `op`, in pieces of at most `SEGMENT` elements.

    `share` is the number of elements of one rank's part: the whole buffer for all_reduce and
    broadcast, one part of the gathered buffer otherwise.
    """
    everyone = range(world_size)
    match op:
        case "all_reduce":
            yield from _split(0, share, tuple((peer, 0) for peer in everyone))
        case "reduce_scatter":
            yield from _split(0, share, tuple((peer, rank * share) for peer in everyone))
        case "broadcast":
            yield from _split(0, share, ((0, 0),))
        case "all_gather":
            for peer in everyone:
                yield from _split(peer * share, share, ((peer, 0),))
        case "all_to_all":
            for peer in everyone:
                yield from _split(peer * share, share, ((peer, rank * share),))
        case _:
            raise ValueError(f"no reference for {op!r}")


def num_roundings(dtype: torch.dtype, world_size: int, *, native: bool, between_nodes: bool) -> int:
    """How often a float sum of the native code, or of others, may have been rounded to `dtype`.

    Native ones once, between nodes once on each node and once more. Others', and sums in a type as
    wide as the accumulator, may be rounded after each addition.
    """
    each = max(1, world_size - 1)
    if not native or dtype in (torch.float32, torch.float64):
        return each
    return min(2, each) if between_nodes else 1


def count_wrong(
    output: torch.Tensor,
    expected: Iterator[OutputPiece],
    *,
    num_roundings: int,
) -> int:
    """How many elements of the flat `output` are not what `expected` says.

    Copies and integer sums must be exact. A float sum may be off by `num_roundings` roundings to
    its dtype: 1 means the exact sum correctly rounded, or its neighbour (within one unit in the
    last place); n means the bound of n roundings of partial sums.
    """
    device = output.device
    # Counted where the output lies, and read once: gigabytes on a GPU are checked in a second.
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for piece in expected:
        actual = output[piece.start : piece.start + piece.count]
        parts = (
            values(rank, start, piece.count, output.dtype, device=device)
            for rank, start in piece.sources
        )
        if len(piece.sources) == 1 or not output.dtype.is_floating_point:
            exact = sum(parts, start=torch.zeros((), dtype=output.dtype, device=device))
            wrong += (actual != exact).sum()
            continue
        total = torch.zeros(piece.count, dtype=torch.float64, device=device)
        magnitude = torch.zeros(piece.count, dtype=torch.float64, device=device)
        for part in parts:
            total += part.double()
            magnitude += part.double().abs()
        bound = tolerance(total, magnitude, output.dtype, num_roundings)
        # Written so that a NaN counts as wrong.
        wrong += (~((actual.double() - total).abs() <= bound)).sum()
    return int(wrong)


def tolerance(
    total: torch.Tensor,
    magnitude: torch.Tensor,
    dtype: torch.dtype,
    num_roundings: int,
) -> torch.Tensor:
    """The largest error of a sum `total` of terms whose magnitudes add up to `magnitude`.

    All are float64. One rounding: a unit in the last place of the result, plus what accumulating in
    float32 may add. More: each may be off by half a unit of a partial sum, at most `magnitude`.
    """
    epsilon = torch.finfo(dtype).eps
    if num_roundings > 1:
        return magnitude * (epsilon * num_roundings / 2)
    # A number over its mantissa is a power of two, exactly, from which mantissas are in [1/2, 1).
    unit = total / torch.frexp(total).mantissa * (epsilon / 2)
    unit[total == 0] = 0.0
    accumulated = magnitude * torch.finfo(torch.float32).eps
    return unit + (accumulated if epsilon > torch.finfo(torch.float32).eps else 0.0)


def _split(start: int, count: int, sources: tuple[tuple[int, int], ...]) -> Iterator[OutputPiece]:
    for offset in range(0, count, SEGMENT):
        yield OutputPiece(
            start=start + offset,
            count=min(SEGMENT, count - offset),
            sources=tuple((rank, first + offset) for rank, first in sources),
        )
