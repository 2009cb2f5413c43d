"""Two ways of training that take turns, step by step, and when one of them is faster."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from deepytorch_core import guard

# Steps of one way in a row, of which the first is not counted.
BLOCK = 4
# Rounds of a block of each way after which the times are looked at: one way may be faster, or both
# alike; after the last it is decided.
LOOKS = (2, 4, 7)
FASTER, SLOWER, UNDECIDED = "faster", "slower", "not faster beyond the noise"
MOST_STEPS = 2 * BLOCK * LOOKS[-1]
"""After how many measured steps it is decided at the latest."""
LEAST_COUNTED = (BLOCK - 1) * LOOKS[0]
"""Each way needs the times of so many steps before anything is decided."""


def is_candidates(measured: int) -> bool:
    """Whether the candidate has the step, of those that are measured."""
    return measured // BLOCK % 4 in (1, 2)


def is_counted(measured: int) -> bool:
    """Whether the step's time counts."""
    return measured >= 0 and measured % BLOCK != 0


def is_look(measured: int) -> bool:
    """Whether the times are looked at before the step."""
    rounds, rest = divmod(measured, 2 * BLOCK)
    return measured >= 0 and rest == 0 and rounds in LOOKS


def is_last_look(measured: int) -> bool:
    """Whether it is decided before the step."""
    return measured == MOST_STEPS


def is_faster(candidate: list[float], standing: list[float]) -> bool:
    """Beyond the noise, and round by round: a machine's load comes and goes in longer waves."""
    size = BLOCK - 1
    rounds = list(range(0, min(len(candidate), len(standing)), size))
    won = sum(
        guard.median(candidate[at : at + size]) < guard.median(standing[at : at + size])
        for at in rounds
    )
    return guard.is_faster(candidate, standing) and won >= len(rounds) - len(rounds) // 4


def are_alike(candidate: list[float], standing: list[float]) -> bool:
    """Whether the least gain that counts is out of reach for both, by twice the noise: more steps
    would not tell them apart."""
    apart = abs(guard.median(standing) - guard.median(candidate))
    noise = guard.noise(candidate) + guard.noise(standing)
    return apart + 2 * noise < guard.LEAST_GAIN * guard.median(standing)


def verdict(standing: list[float], candidate: list[float], *, is_last: bool) -> str | None:
    """Tell which way is faster, as far as steps have shown; None if more of them may tell.

    Args:
        standing, candidate: seconds of steps.
        is_last: whether no more follow.

    Returns `FASTER` or `SLOWER` of the candidate, `UNDECIDED` where noise hides it.
    """
    if min(len(standing), len(candidate)) < LEAST_COUNTED:
        return UNDECIDED if is_last else None
    if is_faster(candidate, standing):
        return FASTER
    if is_faster(standing, candidate):
        return SLOWER
    return UNDECIDED if is_last or are_alike(candidate, standing) else None


Rows = dict[str, list[float]]


class Samples:
    """The seconds of the counted steps of both ways, and how many tokens they trained."""

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._tokens: dict[bool, list[float]] = {False: [], True: []}

    def add(self, is_candidate: bool, seconds: float, tokens: int) -> None:
        """Another step; infinite `seconds` for one whose time says nothing."""
        self._seconds[is_candidate].append(seconds)
        self._tokens[is_candidate].append(float(tokens))

    def rows(self) -> Rows:
        """This rank's, for the others."""
        rows = {f"seconds {way}": each for way, each in self._seconds.items()}
        return rows | {f"tokens {way}": each for way, each in self._tokens.items()}

    @staticmethod
    def merged(
        tables: Sequence[Rows], *, is_filtered: bool = False
    ) -> tuple[list[float], list[float]]:
        """All ranks' seconds of typical steps: what stands, the candidate.

        The slowest rank's time counts, and the most tokens that one of them had. `is_filtered`
        leaves out the steps whose time says nothing; they count as endless ones otherwise.
        """
        slowest = guard.slowest(tables)
        standing, candidate = (
            list(zip(slowest[f"seconds {way}"], slowest[f"tokens {way}"], strict=True))
            for way in (False, True)
        )
        if is_filtered:
            standing, candidate = _timed(standing), _timed(candidate)
        return of_typical_steps(standing, candidate)


Step = tuple[float, float]
"""Seconds and tokens."""


def _timed(steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if math.isfinite(step[0])]


def of_typical_steps(
    standing: Sequence[Step], candidate: Sequence[Step]
) -> tuple[list[float], list[float]]:
    """The seconds as if each step had trained the median number of tokens.

    A step takes some time whatever it trains, for weights, gradients and their collectives, and
    some for each token. The latter is the median slope between two steps of one way (Theil 1950,
    Sen 1968): a step that was held up doesn't move it.
    """
    together = [*standing, *candidate]
    if not together:
        return [], []
    typical = statistics.median(tokens for _, tokens in together)
    slopes = [
        (step[0] - other[0]) / (step[1] - other[1])
        for way in (standing, candidate)
        for step, other in itertools.combinations(way, 2)
        if abs(step[1] - other[1]) > typical / 10 and math.isfinite(step[0] + other[0])
    ]
    slope = 0.0
    if slopes:
        # No step takes longer for fewer tokens, and none takes less than nothing for none.
        most = guard.median([seconds / max(1.0, tokens) for seconds, tokens in together])
        slope = min(max(0.0, statistics.median(slopes)), most)

    def evened(way: Sequence[Step]) -> list[float]:
        return [seconds - slope * (tokens - typical) for seconds, tokens in way]

    return evened(standing), evened(candidate)


def tokens_in(args: Any, kwargs: Any) -> int:
    """The size of a batch: the elements of its largest tensor."""
    leaves: list[Any] = tree_leaves((args, kwargs))
    return max([1, *(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))])
