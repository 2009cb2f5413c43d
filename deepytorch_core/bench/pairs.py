"""How many times faster one arm's steps are than another's, step by step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from deepytorch_core.base.provenance import Record

LEAST_STEPS = 4
"""Quartiles of fewer say nothing."""

Rounds = Sequence[Sequence[float]]


def speedup(slow: Rounds, fast: Rounds) -> list[float]:
    """Return [median, lower quartile, upper quartile] of the ratios of all pairs of steps.

    Both arms' steps are given in microseconds, by rounds. Steps of the same number make a pair, as
    both arms take the same batches in the same order. The median is of the same ratios as the
    quartiles, so it can't lie outside them.

    Raises ValueError where the arms differ in rounds or steps.
    """
    ratios = [
        stock / ours
        for slow_round, fast_round in zip(slow, fast, strict=True)
        for stock, ours in zip(slow_round, fast_round, strict=True)
    ]
    if len(ratios) == 1:
        return ratios * 3
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return [median, lower, upper]


def of_record(record: Record, slow: str | None, fast: str) -> list[float] | None:
    """`speedup` between two arms of a workload's record; None where it lacks one of them."""
    arms = record["arms"]
    if slow not in arms or fast not in arms:
        return None
    return speedup(arms[slow]["samples_us"], arms[fast]["samples_us"])


def refuse_few(name: str, records: Sequence[Record]) -> None:
    """Raise ValueError for a record of workloads whose arms have fewer than `LEAST_STEPS` steps."""
    for record in records:
        for arm, measured in record["arms"].items():
            steps = sum(map(len, measured["samples_us"]))
            if steps < LEAST_STEPS:
                raise ValueError(
                    f"{name}: {record['workload']} has {steps} steps of {arm}: "
                    f"measure {LEAST_STEPS} or more"
                )
