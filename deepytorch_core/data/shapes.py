"""Few shapes for many batches, for code that is made anew for every shape.

Packed batches differ in their number of tokens. Eager code doesn't mind, and `torch.compile` makes
code for all of them after the second. CUDA graphs and code compiled with static shapes do mind. For
them the totals are rounded up to a handful of sizes. The rest is filled with tokens that form
sequences of their own and are trained on nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_MULTIPLE = 64  # tokens; matrix units like it, and it costs next to nothing
_NUM_WATCHED = 12  # batches, before the sizes are chosen
_HEADROOM = 1.3  # of the largest batch so far, as larger ones are still to come
_LEAST_RATIO = 1.03  # of a size to the one below


class Shape(NamedTuple):
    """The shape that a packed batch is filled up to."""

    num_tokens: int
    num_sequences: int
    max_length: int


@dataclass(frozen=True)
class Seen:
    """The first batches of a run, by which sizes were chosen.

    Attributes:
        num_tokens: of each of the first ones.
        num_sequences: the most of one.
        longest: tokens of the longest sequence.
        longest_row: tokens of the longest that came packed; 0: none did.
    """

    num_tokens: tuple[int, ...]
    num_sequences: int
    longest: int
    longest_row: int

    def holds(self, num_tokens: int) -> bool:
        """Whether a batch of so many tokens may be one of them."""
        least, most = min(self.num_tokens), max(self.num_tokens)
        return least <= _HEADROOM * num_tokens and num_tokens <= _HEADROOM * most


class Shapes:
    """Chooses the shape of each packed batch.

    Args:
        limit: how many shapes to use for batches like the first ones; None takes every batch as it
            is. Only the longest length so far is rounded up to a power of two, as compiled code is
            made anew where that number changes.
        max_length: with a limit, tokens that no sequence exceeds.

    With a limit the first 12 batches take the largest shape, which holds as many of the longest
    sequences as the first batch has rows. Then sizes are in equal ratios, from the smallest of
    these batches to beyond the largest. Other batches have sizes that go on by that ratio. `resume`
    takes the batches of an earlier run for the first ones.
    """

    def __init__(self, limit: int | None = None, *, max_length: int | None = None) -> None:
        if limit is not None and (limit < 2 or max_length is None or max_length < 1):
            raise ValueError(
                f"limit={limit}, max_length={max_length}: expected a limit of at least 2, and the "
                "tokens of the longest sequence"
            )
        self.limit = limit
        self.are_few = limit is not None
        """Whether the last batch has one of the few shapes."""
        self._waits = False
        self._longest = max_length or 0
        self._watched: list[int] = []
        self._ratio: float | None = None
        self._num_sequences = 0
        self._longest_row = 0  # of those that came packed
        self._earlier: Seen | None = None
        self._num_unsure = 0  # batches that may show yet that the earlier ones were others
        self._tell: Callable[[Seen], None] | None = None

    def fit(
        self, num_tokens: int, num_sequences: int, longest: int, *, is_row: bool = False
    ) -> Shape:
        """The shape for a batch of so many tokens and sequences.

        With a limit, its `num_sequences` are as many as any batch has, and enough for the filling
        in sequences of `max_length` at most.

        Args:
            num_tokens: of the batch.
            num_sequences: of the batch.
            longest: tokens of its longest sequence.
            is_row: whether it came packed. Such rows are about as long as each other, and hold
                ever other numbers of sequences, so powers of two stand for these.
        """
        limit = self.limit
        self._compare(num_tokens)
        self._longest = max(self._longest, longest)
        if is_row:
            self._longest_row = max(self._longest_row, num_tokens)
            num_sequences = _power_of_two(num_sequences)
        self._num_sequences = max(self._num_sequences, num_sequences)
        is_watching = len(self._watched) < _NUM_WATCHED
        if is_watching:
            self._watched.append(num_tokens)
        self.are_few = limit is not None and not (is_watching and self._waits)
        if limit is None or not self.are_few:
            return Shape(num_tokens, num_sequences, _power_of_two(self._longest))
        most = self._longest_row if is_row else self._num_sequences * self._longest
        largest = _rounded(max(most, num_tokens))
        if is_watching:
            return self._shape(largest)
        if self._ratio is None:
            self._ratio = _ratio(self._watched, limit)
            if self._tell is not None and self._earlier is None:
                self._tell(self._seen())
        least = min(self._watched)
        steps = max(0, math.ceil(math.log(num_tokens / least, self._ratio)))
        size = _rounded(least * self._ratio**steps)
        return self._shape(min(largest, max(size, num_tokens)))

    def use_few(self, limit: int | None) -> None:
        """From the next batch on choose among so many shapes, knowing those before; None: any.

        Until 12 batches are known, they are taken as they are.
        """
        self.limit = limit
        self._waits = True

    def resume(self, earlier: Seen | None, tell: Callable[[Seen], None]) -> None:
        """Go by batches of an earlier run, unless one of the first batches is unlike them.

        So an earlier run's code and graphs are for the same sizes. To be called before any batch
        was seen that is to be filled up. `tell` gets this run's batches, where sizes go by these.
        """
        self._tell = tell
        if earlier is not None and self._ratio is None:
            self._earlier, self._num_unsure = earlier, _NUM_WATCHED
            self._watched = list(earlier.num_tokens)
            self._num_sequences = max(self._num_sequences, earlier.num_sequences)
            self._longest = max(self._longest, earlier.longest)
            self._longest_row = max(self._longest_row, earlier.longest_row)

    def _compare(self, num_tokens: int) -> None:
        """Forget the earlier run's batches where this run has others."""
        if self._num_unsure == 0:
            return
        self._num_unsure -= 1
        if self._earlier is not None and not self._earlier.holds(num_tokens):
            self._earlier, self._num_unsure, self._ratio = None, 0, None
            self._watched, self._num_sequences = [], 0
            self._longest = self._longest_row = 0

    def _seen(self) -> Seen:
        return Seen(tuple(self._watched), self._num_sequences, self._longest, self._longest_row)

    def _shape(self, num_tokens: int) -> Shape:
        # Attention is launched for the longest sequence, so the filling is none that is longer.
        longest = _power_of_two(self._longest)
        return Shape(num_tokens, self._num_sequences + -(-num_tokens // longest), longest)


def _ratio(batches: list[int], num_sizes: int) -> float:
    """Return the ratio that leads from the smallest batch to beyond the largest in so many."""
    spread = max(batches) * _HEADROOM / min(batches)
    return max(_LEAST_RATIO, math.exp(math.log(spread) / num_sizes))


def _rounded(num_tokens: float) -> int:
    return -(-int(num_tokens) // _MULTIPLE) * _MULTIPLE


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
