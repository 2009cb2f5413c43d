"""Times of candidates taken in turns, and when one of them is faster."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

# A candidate has to be this much faster at least, whatever the noise.
LEAST_GAIN = 0.02

ROUNDS = 7
# Shorter calls are repeated to this within a sample.
SAMPLE_S = 2e-3

Clock = Callable[[Callable[[], object]], float]
"""Gives the seconds of a call."""


def interleaved(
    arms: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = ROUNDS,
    budget_s: float = math.inf,
    prepare: Callable[[str], object] = lambda name: None,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Seconds of a call of each arm, `rounds` samples each, the arms in turns.

    Each arm is called twice before. Stops early, with whole rounds and not before the second, when
    `budget_s` is over. Every second round goes backwards, so that no arm always follows another.

    Args:
        arms: calls by name.
        device: where they compute.
        rounds: samples of each arm.
        budget_s: seconds for all of it.
        prepare: called with an arm's name before each of its samples, untimed.
        clock: what times a call, if not from outside and repeated to a sample's length.
    """
    began = time.perf_counter()
    repetitions = {}
    for name, call in arms.items():
        prepare(name)
        call()
        took = _timed(call, 1, device)
        repetitions[name] = max(1, min(100, math.ceil(SAMPLE_S / max(took, 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for number in range(rounds):
        if number >= 2 and time.perf_counter() - began > budget_s:
            break
        for name in order if number % 2 == 0 else reversed(order):
            prepare(name)
            if clock is not None:
                samples[name].append(clock(arms[name]))
            else:
                samples[name].append(_timed(arms[name], repetitions[name], device))
    return samples


def _timed(call: Callable[[], object], repetitions: int, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repetitions):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / repetitions


def synchronize(device: torch.device) -> None:
    """Wait for what was launched on `device`; nothing to do for the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def median(samples: Sequence[float]) -> float:
    """The median, not above a sample that was not taken (infinity)."""
    return statistics.median_low(samples)


def noise(samples: Sequence[float]) -> float:
    """How far the median can be relied on: the median distance from it, for this many samples."""
    middle = median(samples)
    return 3 * median([abs(sample - middle) for sample in samples]) / math.sqrt(len(samples))


def is_faster(candidate: Sequence[float], standing: Sequence[float]) -> bool:
    """Whether `candidate` beats what stands beyond the noise of both."""
    gain = median(standing) - median(candidate)
    threshold = max(LEAST_GAIN * median(standing), noise(candidate) + noise(standing))
    return gain > threshold


def in_ms(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians in milliseconds of samples in seconds."""
    return {name: 1e3 * median(samples) for name, samples in times.items()}
