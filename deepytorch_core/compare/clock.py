"""Times every optimizer step of a run on the device's own clock, and profiles the last few.

Nothing waits for the device until the profile begins. On a GPU the end of a step is an event in its
stream, which is read when the run is over.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepytorch_core.base import memory
from deepytorch_core.compare.plan import PROFILED_STEPS, UNTIMED_STEPS, WARMED_STEPS

TIMED_STEPS = 40
"""So many steps before the profile give the steady step time; half of all where they are few."""
WINDOW = 8
"""Steps are steady from the first on where so many are."""
_NEAR = 1.25
_FAR = 2.5
# A device's copies and fills are recorded beside its kernels, and keep no multiprocessor busy.
_NO_KERNELS = ("Memcpy", "Memset", "ProfilerStep")


@dataclass(frozen=True)
class StepPace:
    """Say how fast steps were.

    Attributes:
        step_s: seconds of a steady step: lower quartile, median, upper quartile.
        num_steps: how many steps that is of.
        steady_from: the first step from which on steps are steady, from 2; None where none is.
        to_steady_s: seconds from the end of the first step until steps were steady.
        longest_s: the longest step after the first.
    """

    step_s: tuple[float, float, float]
    num_steps: int
    steady_from: int | None
    to_steady_s: float | None
    longest_s: float


def pace(step_s: Sequence[float]) -> StepPace | None:
    """Sum up the times of the steps from the second on, in seconds; None without any."""
    if not step_s:
        return None
    timed = last(step_s)
    median = statistics.median(timed)
    first = steady_from(step_s, median)
    return StepPace(
        step_s=quartiles(timed),
        num_steps=len(timed),
        steady_from=None if first is None else first + 2,
        to_steady_s=None if first is None else sum(step_s[:first]),
        longest_s=max(step_s),
    )


def last(step_s: Sequence[float]) -> Sequence[float]:
    """Return the times that count as those of steady steps: none of none."""
    return step_s[-min(TIMED_STEPS, max(1, (len(step_s) + 1) // 2)) :]


def steady_from(step_s: Sequence[float], median: float) -> int | None:
    """Find the index at which the first `WINDOW` of steady times begins; None without one.

    They are steady where their median is near the steady `median` and none is far above it.
    """
    for first in range(len(step_s) - WINDOW + 1):
        window = step_s[first : first + WINDOW]
        if statistics.median(window) <= _NEAR * median and max(window) <= _FAR * median:
            return first
    return None


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper one of at least one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """Return for how long at least one of the intervals (start, end) lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


@dataclass(frozen=True)
class Work:
    """Say in which share of the profiled steps' time a GPU computed, and its kernels a step.

    `why_not` says why neither is known.
    """

    busy_share: float | None = None
    kernels_per_step: float | None = None
    why_not: str = ""


class StepClock:
    """Takes the time of every optimizer step; `record` is for when the run is over."""

    def __init__(self, *, seconds: float | None) -> None:
        self._seconds = seconds
        self._began = time.perf_counter()
        self._ends: list[tuple[float, Any]] = []
        self._untimed_after: int | None = None
        self._profile: Any = None
        self._profile_began = 0.0
        self._work = Work()
        self._gpus: list[int] = []

    def is_over(self) -> bool:
        """Tell whether the run has lasted as long as it may, since its first step."""
        if self._seconds is None or not self._ends:
            return False
        return time.perf_counter() - self._ends[0][0] >= self._seconds

    def stepped(self, steps_left: int) -> None:
        """Note the end of a step, with so many left in the run."""
        self._ends.append((time.perf_counter(), self._event()))
        if steps_left == UNTIMED_STEPS:
            self._untimed_after = len(self._ends)
            self._begin_profile()
        elif self._profile is not None and steps_left == PROFILED_STEPS:
            self._profile_kernels()
        elif self._profile is not None and steps_left == 0:
            self._end_profile()

    def step_s(self) -> list[float]:
        """Return the seconds of steps, without the profiled ones; wait for the device."""
        ends = self._ends[: self._untimed_after]
        self._synchronize()
        return [_between(*pair) for pair in zip(ends, ends[1:], strict=False)]

    def timed_s(self) -> list[float]:
        """Return the seconds of each step that counts as a steady one."""
        return list(last(self.step_s()))

    def timed_steps(self) -> range:
        """Return the numbers of those steps, from 0."""
        step_s = self.step_s()
        return range(len(step_s) + 1 - len(last(step_s)), len(step_s) + 1)

    def record(self) -> dict[str, Any]:
        """Return the `StepPace`, the `Work` and how long the first step took to come, for JSON."""
        found = pace(self.step_s())
        return {
            "first_step_s": self._ends[0][0] - self._began if self._ends else None,
            **({} if found is None else dataclasses.asdict(found)),
            **dataclasses.asdict(self._work),
        }

    def _begin_profile(self) -> None:
        if not self._gpus:
            self._work = Work(why_not="nothing ran on a GPU")
            return
        try:
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA],
                schedule=torch.profiler.schedule(
                    wait=0, warmup=WARMED_STEPS, active=PROFILED_STEPS, repeat=1
                ),
            )
            self._profile.start()
        except (RuntimeError, AssertionError) as error:  # the script profiles itself
            self._profile, self._work = None, Work(why_not=str(error))

    def _profile_kernels(self) -> None:
        self._synchronize()
        self._profile.step()
        self._profile_began = time.perf_counter()

    def _end_profile(self) -> None:
        self._synchronize()
        span_s = time.perf_counter() - self._profile_began
        self._profile.stop()
        kernels = [
            (event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in self._profile.events()
            if event.device_type.name == "CUDA" and not event.name.startswith(_NO_KERNELS)
        ]
        self._profile = None
        if not kernels:  # a container may keep the tracing of GPUs from its programs
            self._work = Work(why_not="the profiler has seen no kernels")
            return
        self._work = Work(
            busy_share=min(1.0, busy(kernels) / span_s),
            kernels_per_step=len(kernels) / PROFILED_STEPS,
        )

    def _event(self) -> Any:
        """Mark the end of what the current stream has been given; None on the CPU."""
        if not self._gpus:  # asked until there is one, as asking takes longer than an event
            self._gpus = memory.gpus()
        if not self._gpus or torch.cuda.is_current_stream_capturing():
            return None
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _synchronize(self) -> None:
        for index in self._gpus:
            torch.cuda.synchronize(index)


def _between(end: tuple[float, Any], other: tuple[float, Any]) -> float:
    """Return the seconds from one step's end to another's."""
    if end[1] is None or other[1] is None:
        return other[0] - end[0]
    return float(end[1].elapsed_time(other[1])) / 1e3
