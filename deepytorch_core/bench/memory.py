"""GPU memory of `bench collectives`: allocated once for all rows, and refused when it cannot fit.

Rows share their buffers, so nothing that a captured graph, a peer or a registration may still refer
to is freed between rows.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from deepytorch_core.bench import timing
from deepytorch_core.bench.job import BenchError, format_size
from deepytorch_core.bench.ops import Allocate, Buffers, share_bytes
from deepytorch_core.bench.rows import Row

HEADROOM = 2 << 30  # for what both arms' libraries, the check and graphs take


class Arena:
    """Memory for the input and the output of each of `rows`, one row at a time."""

    def __init__(
        self, rows: Iterable[Row], allocate: Allocate, allocate_output: Allocate | None = None
    ) -> None:
        """`allocate_output` allocates outputs that are no inputs; None: `allocate` does."""
        places = arena_bytes(rows)
        allocates = (allocate, allocate_output or allocate)
        self.places = [
            make(num_bytes, torch.uint8)
            for make, num_bytes in zip(allocates, places, strict=True)
            if num_bytes
        ]

    def buffers(self, row: Row) -> Buffers:
        """The row's buffers, which are those of every other row too."""
        places: Iterator[torch.Tensor] = iter(self.places)
        return row.buffers(lambda count, dtype: next(places)[: count * dtype.itemsize].view(dtype))


def arena_bytes(rows: Iterable[Row]) -> tuple[int, int]:
    """Bytes of the largest input and of the largest output that is a tensor of its own."""
    largest = (0, 0)
    for row in rows:
        source, target = share_bytes(row.op, row.share, row.torch_dtype, row.world_size)
        largest = (max(largest[0], source), max(largest[1], target))
    return largest


def refuse_too_large(rows: Sequence[Row], free_bytes: int, ranks: timing.Agreement) -> None:
    """Raises BenchError, on all ranks alike, when both arms' buffers fit not on every GPU.

    `free_bytes` is what this rank's GPU has left.
    """
    places = arena_bytes(rows)
    # A rival may need an output where ours works in place.
    needed = 2 * (places[0] + max(places)) + HEADROOM
    free = -ranks.maximum([-float(free_bytes)])[0]
    if needed > free:
        largest = max(rows, key=lambda row: sum(arena_bytes([row])))
        raise BenchError(
            f"{largest.op.name} of {format_size(largest.num_bytes)} and what goes with it need "
            f"{math.ceil(needed / 2**30)} GiB of each GPU, and one has {free / 2**30:.0f} GiB "
            "free: give smaller --sizes"
        )
