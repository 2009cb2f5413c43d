"""The course of a run: its optimizer steps, and what the time between them went into.

Kept for `deepytorch.report()` and what is shown live. It costs a look at the clock at a step. A few
times a second at most it also costs a sample of counters that are kept anyway. Samples are merged
when there are many, so a long run takes no more memory than a short one. Nothing waits for a
device.

An optimizer may be stepped several times for one step, once for each part of what it updates
(ZeRO-3). There may also be several optimizers. So a step is over when the same parameters are
stepped on again.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from deepytorch_core.base.console import global_rank
from deepytorch_core.metering import apart, counts
from deepytorch_core.metering.gpu_work import GpuWork

_MOST_BUCKETS = 120
_MOST_LOSSES = 500
_INTERVAL_S = 0.25
# A sample may take this share of the time from one to the next.
_SHARE = 0.003


@dataclass(frozen=True)
class Counters:
    """Seconds that this process spent since its start, or since it was forked.

    Attributes:
        exposed_s: of its threads in collectives on host memory, what computation did not hide.
            Collectives on a GPU's stream hold up no thread and are not in it.
        waited_s: in native ones of those, until all ranks of the node were there.
        held_s: how long the node's other ranks waited for this one alone, in all.
        data_s: waiting for DataLoaders.
        tuning_s: measuring plans, most of it within exposed_s.
    """

    exposed_s: float = 0.0
    waited_s: float = 0.0
    held_s: float = 0.0
    data_s: float = 0.0
    tuning_s: float = 0.0

    def since(self, before: Counters) -> Counters:
        """Return the amounts added since; never negative, as counters can be reset."""
        names = [field.name for field in dataclasses.fields(self)]
        return Counters(*(max(0.0, getattr(self, n) - getattr(before, n)) for n in names))


def _clocks() -> tuple[float, float, float]:
    """`exposed_s`, `data_s` and `tuning_s`, which are cheap enough to be asked at every step."""
    loaders = sys.modules.get("deepytorch_core.metering.loader_waits")
    data_s = loaders.waited_s() if loaders is not None else 0.0
    return counts.exposed_s(), data_s, counts.tuning_s()


def counters() -> Counters:
    """Return the counters as known now. Loads nothing that is not loaded."""
    exposed_s, data_s, tuning_s = _clocks()
    waited_us = held_us = 0.0
    rank = global_rank()
    for group in counts.arrivals():
        waited_us += group["waited_us"]
        held_us += sum(entry["cost_us"] for entry in group["ranks"] if entry["rank"] == rank)
    return Counters(exposed_s, waited_us / 1e6, held_us / 1e6, data_s, tuning_s)


@dataclass(frozen=True)
class Bucket:
    """A stretch of a run, from one step's end to a later one's.

    `start_s` is the wall clock's, so that those of several ranks can be put side by side.
    """

    start_s: float
    seconds: float
    steps: int
    spent: Counters

    def to_dict(self) -> dict[str, Any]:
        plain = {"start_s": self.start_s, "seconds": self.seconds, "steps": self.steps}
        return plain | dataclasses.asdict(self.spent)


def _joined(first: Bucket, second: Bucket) -> Bucket:
    names = [field.name for field in dataclasses.fields(Counters)]
    return Bucket(
        first.start_s,
        first.seconds + second.seconds,
        first.steps + second.steps,
        Counters(*(getattr(first.spent, n) + getattr(second.spent, n) for n in names)),
    )


class Course:
    """Steps and buckets of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: list[Bucket] = []
        self._stepped_on: set[int] = set()
        self._interval_s = _INTERVAL_S
        self._pause_s = 0.0
        self._steps = 0
        self._last_s = 0.0  # when the last step ended
        self._last_clocks = (0.0, 0.0, 0.0)
        self._open: tuple[float, float, int, Counters] | None = None  # where the bucket begins
        self._gpu = GpuWork()
        self._losses: list[tuple[int, float]] = []
        self._stride = 1
        self._num_losses = 0

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        return self._steps

    def stepped(self, optimizer: Any) -> bool:
        """An optimizer has stepped; returns whether a step has ended with that."""
        groups = optimizer.param_groups
        parameters = groups[0]["params"] if groups else ()
        key = id(parameters[0]) if parameters else id(optimizer)
        now = time.monotonic()
        with self._lock:
            self._last_s = now
            self._last_clocks = _clocks()
            if self._stepped_on and key not in self._stepped_on:
                self._stepped_on.add(key)
                return False
            self._stepped_on = {key}
            self._steps += 1
            adapter = sys.modules.get("deepytorch_c10d")
            if adapter is not None:
                adapter.step_ended()
            if self._open is None:
                self._begin(now, counters())
            elif now - self._open[1] >= max(self._interval_s, self._pause_s):
                self._sample(now)
        return True

    def pause(self) -> None:
        """Leave the time from now up to the next step out of all steps."""
        with self._lock:
            if self._open is not None and self._last_s > self._open[1]:
                self._keep(self._open_bucket())
            self._open = None
            self._stepped_on = set()

    def note_loss(self, value: float, step: int | None = None) -> None:
        """Keep a loss for the report; of very many, some."""
        with self._lock:
            if self._num_losses % self._stride == 0:
                self._losses.append((self._steps if step is None else step, float(value)))
            self._num_losses += 1
            if len(self._losses) >= _MOST_LOSSES:
                self._losses = self._losses[::2]
                self._stride *= 2

    def report(self) -> dict[str, Any]:
        """Plain values: steps, seconds, what they were spent on, buckets and losses.

        `gpu_share` is the part of the last minute in which the GPU worked; None if not known.
        """
        with self._lock:
            buckets = list(self._buckets)
            if self._open is not None and self._last_s > self._open[1]:
                buckets.append(self._open_bucket())
            losses = list(self._losses)
            steps = self._steps
        whole = Bucket(0.0, 0.0, 0, Counters())
        for bucket in buckets:
            whole = _joined(whole, bucket)
        plain = whole.to_dict() | {"start_s": buckets[0].start_s if buckets else None}
        # Before the first step's end nothing is timed.
        return plain | {
            "steps": steps,
            "timed_steps": whole.steps,
            "all_tuning_s": counters().tuning_s,
            "gpu_share": self._gpu.share,
            "buckets": [bucket.to_dict() for bucket in buckets],
            "losses": [list(loss) for loss in losses],
        }

    def _begin(self, now: float, known: Counters) -> None:
        self._open = (time.time(), now, self._steps, known)

    def _bucket(self, now: float, known: Counters) -> Bucket:
        assert self._open is not None
        start_s, began, steps, before = self._open
        return Bucket(start_s, now - began, self._steps - steps, known.since(before))

    def _open_bucket(self) -> Bucket:
        """Up to the last step's end. What came after, saving and evaluating, is no step's."""
        exposed_s, data_s, tuning_s = self._last_clocks
        known = dataclasses.replace(
            counters(), exposed_s=exposed_s, data_s=data_s, tuning_s=tuning_s
        )
        bucket = self._bucket(self._last_s, known)
        spent = bucket.spent
        waited_s = min(spent.waited_s, spent.exposed_s)
        return dataclasses.replace(bucket, spent=dataclasses.replace(spent, waited_s=waited_s))

    def _keep(self, bucket: Bucket) -> None:
        self._buckets.append(bucket)
        if len(self._buckets) >= _MOST_BUCKETS:
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
            self._buckets = [_joined(first, second) for first, second in pairs]
            self._interval_s *= 2

    def _sample(self, now: float) -> None:
        began = time.thread_time()
        known = counters()
        self._keep(self._bucket(now, known))
        self._begin(now, known)
        self._gpu.sample()
        self._pause_s = (time.thread_time() - began) / _SHARE


def timed_part(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The course of a saved report, where any step was timed."""
    course: Mapping[str, Any] = report.get("course") or {}
    return course if course.get("seconds") and course.get("timed_steps") else None


def parts_of(course: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a timed course by what they were spent on; they add up to the whole."""
    whole = course["seconds"]
    overhead = min(whole, course["tuning_s"])
    data = min(whole - overhead, course["data_s"])
    # Plans are measured inside the operations that first need them.
    exposed = min(whole - overhead - data, max(0.0, course["exposed_s"] - overhead))
    compute = whole - overhead - data - exposed
    return {"compute": compute, "exposed": exposed, "data": data, "overhead": overhead}


_course = Course()
_hook: Any = None
_at_first_step: Callable[[], object] | None = None


def current() -> Course:
    """This process's."""
    return _course


def note_loss(value: float, step: int | None = None) -> None:
    """Keep a loss for the report's plot: of a training loop of one's own.

    Adapters of frameworks that log do it by themselves.

    Args:
        value: the loss, a number on the host: what the loop prints anyway.
        step: which optimizer step's; default: the last one's.
    """
    _course.note_loss(value, step)


def install(optimizers: ModuleType) -> None:
    """Count the steps of all optimizers of `torch.optim.optimizer`."""
    global _hook
    if _hook is None:
        _hook = optimizers.register_optimizer_step_post_hook(_stepped)


def uninstall() -> None:
    """Count no more."""
    global _hook
    if _hook is not None:
        _hook.remove()
        _hook = None
        _course.pause()
        apart.pause()


def at_first_step(act: Callable[[], object]) -> None:
    """Have `act` called when the first step of this process, or of one forked from it, has ended.

    Maybe several times, where several optimizers are stepped for it.
    """
    global _at_first_step
    _at_first_step = act


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    import torch

    # A step in a graph: looking at the clock would break it.
    if not torch.compiler.is_compiling() and not _is_within_another():
        if _course.stepped(optimizer):
            apart.stepped(optimizer)
        if _at_first_step is not None and _course.steps == 1:
            _at_first_step()


def _is_within_another() -> bool:
    """Whether an optimizer's step steps one: a wrapper its inner one, a subclass its base."""
    wrapper = sys._getframe(2)  # torch's, the same code for all, around every optimizer's step
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code:
            return True
        frame = frame.f_back
    return False


def _begin_anew() -> None:
    """In a forked child: the steps were its parent's, and a thread may have held the lock."""
    global _course
    _course = Course()


os.register_at_fork(after_in_child=_begin_anew)
