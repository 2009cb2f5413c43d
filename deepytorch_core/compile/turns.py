"""Two ways of training that take turns, step by step, and when one of them is faster."""

from __future__ import annotations

from deepytorch_core import guard

# Steps of one way in a row, of which the first is not counted.
BLOCK = 4
# Rounds of a block of each way after which the times are looked at; after the last it is decided.
LOOKS = (2, 4, 7)
MOST_STEPS = 2 * BLOCK * LOOKS[-1]
"""After how many measured steps it is decided at the latest."""


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
