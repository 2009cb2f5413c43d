"""Few shapes for many batches, so that compiled code is compiled a few times only.

Packed batches differ in their number of tokens, sequences and longest sequence. Eager code doesn't
mind. Compiled code does: there the totals are rounded up to a handful of sizes, and what is left
over is filled with tokens that form sequences of their own and are trained on nothing.
"""

from __future__ import annotations

from typing import NamedTuple

_MULTIPLE = 64  # tokens; matrix units like it, and it costs next to nothing
_MAX_WASTE = 0.25  # of a shape's tokens, before another shape is made
_HEADROOM = 1.15  # what a new shape has above the batch that it is made for
_GROWTH = 1.6  # the least that the largest shape grows by


class Shape(NamedTuple):
    """What a packed batch is filled up to."""

    num_tokens: int
    num_sequences: int
    max_length: int


class Shapes:
    """Chooses the shape of each packed batch.

    Args:
        limit: most shapes to use; None takes every batch as it is, with only the longest length
            rounded up to a power of two.

    With a limit the first batches of a run settle the shapes. They are as tight as the limit
    allows: a batch fills at least three quarters of its shape while another shape may be made.
    A batch larger than all of them is always taken, by a larger shape in place of the largest.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 2:
            raise ValueError(f"limit={limit}: expected at least 2, or None")
        self.limit = limit
        self._sizes: list[int] = []
        self._num_sequences = 0
        self._max_length = 0

    def fit(self, num_tokens: int, num_sequences: int, longest: int) -> Shape:
        """The shape for a batch of so many tokens and sequences.

        Its `num_sequences` counts one more than the batch has, which holds the filling.
        """
        if self.limit is None:
            return Shape(num_tokens, num_sequences, _power_of_two(longest))
        size = self._size(num_tokens)
        self._num_sequences = max(self._num_sequences, num_sequences + 1)
        needed = max(longest, size - num_tokens)  # the filling is a sequence too
        if needed > self._max_length:
            # Only the number of blocks that a kernel starts depends on it: better grown seldom.
            self._max_length = _power_of_two(2 * needed)
        return Shape(size, self._num_sequences, self._max_length)

    def _size(self, num_tokens: int) -> int:
        assert self.limit is not None
        fitting = min((size for size in self._sizes if size >= num_tokens), default=None)
        if fitting is None:
            largest = max(self._sizes, default=0)
            if len(self._sizes) == self.limit:
                self._sizes.remove(largest)
            return self._add(max(num_tokens * _HEADROOM, largest * _GROWTH))
        # The last place is kept for a batch larger than all.
        wasteful = num_tokens < (1 - _MAX_WASTE) * fitting
        if wasteful and len(self._sizes) < self.limit - 1:
            return self._add(num_tokens * _HEADROOM)
        return fitting

    def _add(self, size: float) -> int:
        rounded = -(-int(size) // _MULTIPLE) * _MULTIPLE
        self._sizes.append(rounded)
        return rounded


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
