"""Whether two ways of running a script train the same, by the course of their losses.

The yardstick is stock itself: how far its own runs lie apart. Where they are equal bit for bit,
one more run of stock tells what rounding and other random numbers do: see `nudge`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

# So many times as far as stock's runs from each other ours may be from stock's.
_MOST_APART = 3.0
# Chance may leave the yardstick of so few steps short.
_FEW = 16
# Sums in another order change a loss so much within some steps: by a share of it. Losses that go to
# zero change by a share of the largest of all.
_ROUNDING = 1e-3
_ROUNDING_OF_LARGEST = 1e-6


class RunLosses(Protocol):
    """The compared part of a run: see `result.Sample`."""

    @property
    def steps(self) -> int: ...
    @property
    def losses(self) -> Sequence[float | None]: ...
    @property
    def loss_ranks(self) -> int: ...
    @property
    def draws(self) -> Sequence[int]: ...
    @property
    def is_replicated(self) -> bool | None: ...


@dataclass(frozen=True)
class LossAgreement:
    """How the losses of some runs lie to those of stock.

    Attributes:
        difference: the largest at any step between any two runs; None where no loss was seen in
            both, nan where one of them is nan.
        relative: the same, as a share of the larger of both.
        own: `difference` between stock's runs; None where there is but one.
        nudged: between stock's runs and the one that was nudged; None where there is none.
        drawn_from: the first step at which another number of random numbers had been drawn than
            under stock, from 1; None where stock's runs differ in it, too.
        apart: why it is not the same training, in words; None where it is.
        is_by_size: whether that is so only because a difference is large.
    """

    difference: float | None
    relative: float | None
    own: float | None = None
    nudged: float | None = None
    drawn_from: int | None = None
    apart: str | None = None
    is_by_size: bool = False


def agreement(
    theirs: Sequence[RunLosses],
    ours: Sequence[RunLosses],
    nudged: Sequence[RunLosses] = (),
    *,
    whose: str = "stock's",
) -> LossAgreement:
    """Compare `ours` with `theirs`, at least one run of each.

    Args:
        theirs: those of stock.
        ours: the others.
        nudged: those of stock from weights moved a little.
        whose: how to call stock in words.
    """
    difference, relative = largest_difference(theirs, ours)
    why, is_by_size = _otherwise(theirs, ours, whose), False
    if why is None:
        told = f"{whose} runs{', one of them nudged,' if nudged else ''}"
        why = _too_far(theirs, ours, nudged, told)
        is_by_size = why is not None
    return LossAgreement(
        difference=difference,
        relative=relative,
        own=largest_difference(theirs, theirs)[0],
        nudged=largest_difference(theirs, nudged)[0],
        drawn_from=_drawn_from(theirs, ours),
        apart=why,
        is_by_size=is_by_size,
    )


def largest_difference(
    theirs: Sequence[RunLosses], ours: Sequence[RunLosses]
) -> tuple[float | None, float | None]:
    """The largest difference at any step between any two runs: absolute, and relative.

    (None, None) when no loss was seen in both; nan where one of them is nan.
    """
    pairs = [
        (a, b)
        for run in theirs
        for other in ours
        if run is not other
        for a, b in zip(run.losses, other.losses, strict=False)
        if a is not None and b is not None
    ]
    if not pairs:
        return None, None
    differences = [_distance(a, b) for a, b in pairs]
    relative = [
        distance / max(abs(a), abs(b), 1e-12)
        for distance, (a, b) in zip(differences, pairs, strict=True)
    ]
    return _largest(differences), _largest(relative)


def _otherwise(theirs: Sequence[RunLosses], ours: Sequence[RunLosses], whose: str) -> str | None:
    """Say what differs by any yardstick; None if nothing does."""
    stock = theirs[0]
    for run in ours:
        if run.steps != stock.steps:
            return f"it took {run.steps} steps, where {whose} runs took {stock.steps}"
        if run.loss_ranks != stock.loss_ranks:
            return (
                f"{_ranks(run.loss_ranks)} a loss to compare, where in {whose} runs "
                f"{_ranks(stock.loss_ranks)} one"
            )
        if run.is_replicated is False and all(their_run.is_replicated for their_run in theirs):
            return f"its ranks end with different weights, where {whose} end with the same"
        for step, (loss, of_stock) in enumerate(_steps(run, theirs), 1):
            known = [their_loss for their_loss in of_stock if their_loss is not None]
            if (loss is None) != (not known):
                return (
                    f"it has {'no' if loss is None else 'a'} loss to compare at step {step}, where "
                    f"{whose} runs have {'one' if loss is None else 'none'}"
                )
            if loss is None or any(map(math.isfinite, known)) != all(map(math.isfinite, known)):
                continue  # where stock itself comes to both, so may ours
            if math.isfinite(loss) != math.isfinite(known[0]):
                return f"its loss is {loss:.6g} at step {step}, where {whose} is {known[0]:.6g}"
    return None


def _ranks(count: int) -> str:
    return f"{count} rank{' has' if count == 1 else 's have'}"


def _steps(
    run: RunLosses, theirs: Sequence[RunLosses]
) -> Iterator[tuple[float | None, tuple[float | None, ...]]]:
    return zip(
        run.losses, zip(*(their_run.losses for their_run in theirs), strict=False), strict=False
    )


def _too_far(
    theirs: Sequence[RunLosses], ours: Sequence[RunLosses], nudged: Sequence[RunLosses], told: str
) -> str | None:
    """Say where losses lie further apart than rounding and stock's own runs explain."""
    numbers = range(min(len(run.losses) for run in theirs))
    stock = [_known(theirs, number) for number in numbers]
    own = [_spread(stock[number], [*stock[number], *_known(nudged, number)]) for number in numbers]
    distances = [_spread(stock[number], _known(ours, number)) for number in numbers]
    scale = max(map(_size, stock), default=0.0)
    rounding = [_ROUNDING * _size(losses) + _ROUNDING_OF_LARGEST * scale for losses in stock]
    for step, distance in enumerate(distances):
        # Runs come apart sooner or later, by chance: what stock's do by twice as many steps.
        reached = max(own[: max(2 * (step + 1), _FEW)])
        if distance > max(rounding[step], _MOST_APART * reached):
            share = distance / _size([*stock[step], *_known(ours, step)])
            return (
                f"its loss is {distance:.3g} off at step {step + 1} ({share:.1%} of it), where "
                f"{told} are at most {reached:.3g} apart"
            )
    if len(numbers) < _FEW:
        return None
    half = len(numbers) // 2
    middle, own_middle = statistics.median(distances[:half]), statistics.median(own)
    if middle > max(statistics.median(rounding[:half]), _MOST_APART * own_middle):
        return (
            f"its losses are {middle:.3g} off in the median of half of the steps, where {told} are "
            f"{own_middle:.3g} apart"
        )
    return None


def _known(runs: Sequence[RunLosses], step: int) -> list[float]:
    """The losses at a step, of the runs that have one; none where all of them are no number."""
    found = [loss for run in runs for loss in run.losses[step : step + 1] if loss is not None]
    return found if any(map(math.isfinite, found)) else []


def _size(losses: Sequence[float]) -> float:
    return max((abs(loss) for loss in losses if math.isfinite(loss)), default=0.0)


def _spread(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest distance of one to one of the others; infinite to what is no number."""
    found = [_distance(a, b) for a in some for b in others]
    return max((math.inf if distance != distance else distance for distance in found), default=0.0)


def _drawn_from(theirs: Sequence[RunLosses], ours: Sequence[RunLosses]) -> int | None:
    for step, of_stock in enumerate(zip(*(run.draws for run in theirs), strict=False)):
        if len(set(of_stock)) > 1:
            return None
        if any(run.draws[step : step + 1] != of_stock[:1] for run in ours):
            return step + 1
    return None


def _distance(a: float, b: float) -> float:
    return 0.0 if a == b or (a != a and b != b) else abs(a - b)


def _largest(values: Sequence[float]) -> float:
    # max() alone would step over a nan.
    return next((value for value in values if value != value), max(values))
