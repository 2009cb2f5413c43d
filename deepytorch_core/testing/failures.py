"""Holds what `spawn_ranks` raises, and how it words what went wrong on which rank."""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
from collections.abc import Mapping

from deepytorch_core.testing.nursery import Worker
from deepytorch_core.testing.worker import CallOutcome, FunctionRef

_DUMP_S = 3.0  # how long a stuck worker may take to write its stacks


class RankError(RuntimeError):
    """Some ranks of a `spawn_ranks` call failed.

    Attributes:
        rank: the rank that failed first.
        traceback: that rank's traceback, or its stacks when it was stuck or died.
        exceptions: rank -> its exception, for every rank that failed. Where an exception could
            not be pickled, or the process died, a RuntimeError with its text.
        stacks: rank -> the Python stacks of a rank that was stuck, or crashed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        traceback: str = "",
        exceptions: Mapping[int, BaseException] | None = None,
        stacks: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.exceptions = dict(exceptions or {})
        self.stacks = dict(stacks or {})


class RankTimeoutError(RankError):
    """Some ranks did not finish within `timeout_s`."""


class Failures:
    """Collects what went wrong on which rank, and words it."""

    def __init__(self, function: FunctionRef, world_size: int, timeout_s: float) -> None:
        self._function = function
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._exceptions: dict[int, BaseException] = {}  # in order of arrival
        self._tracebacks: dict[int, str] = {}
        self._stacks: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._exceptions)

    def add_exception(self, rank: int, outcome: CallOutcome) -> None:
        error: BaseException = RuntimeError(outcome.summary)
        if outcome.payload is not None:
            # An exception class of a module that only the worker imported: its text must do.
            with contextlib.suppress(Exception):
                error = pickle.loads(outcome.payload)
        self._exceptions[rank] = error
        self._tracebacks[rank] = outcome.traceback

    def add_death(self, worker: Worker) -> None:
        code = worker.wait()
        how = f"exited with code {code} in the middle of the call"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        self._exceptions[worker.rank] = RuntimeError(f"rank {worker.rank} {how}")
        self._stacks[worker.rank] = worker.stacks()

    def add_stuck(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        for worker in workers:
            # Written bit by bit, the main thread last: this is its outermost frame.
            while "in <module>" not in worker.stacks() and time.monotonic() < deadline:
                time.sleep(0.02)
            self._stacks[worker.rank] = worker.stacks() or "(none: it does not answer signals)"

    def raise_if_any(self) -> None:
        if not self._exceptions and not self._stacks:
            return
        timed_out = not self._exceptions
        rank = next(iter(self._exceptions), next(iter(self._stacks), -1))
        text = self._tracebacks.get(rank) or self._stacks.get(rank, "")
        error = (RankTimeoutError if timed_out else RankError)(
            "\n".join(self._lines(timed_out)),
            rank=rank,
            traceback=text,
            exceptions=self._exceptions,
            stacks=self._stacks,
        )
        raise error from self._exceptions.get(rank)

    def _lines(self, timed_out: bool) -> list[str]:
        name = f"{self._function.qualname} ({self._function.path})"
        if timed_out:
            stuck = sorted(self._stacks)
            lines = [f"{name}: ranks {stuck} did not finish within {self._timeout_s:g} s"]
        else:
            failed = list(self._exceptions)
            lines = [f"{name}: {len(failed)} of {self._world_size} ranks failed: {failed}"]
        for rank, error in self._exceptions.items():
            lines.append(f"\n--- rank {rank}: {type(error).__name__}: {error}")
            lines.append(self._tracebacks.get(rank, "").rstrip())
        for rank, stacks in self._stacks.items():
            state = "when it died" if rank in self._exceptions else "where it was stuck"
            lines.append(f"\n--- rank {rank}: stacks {state}\n{stacks}")
        return lines
