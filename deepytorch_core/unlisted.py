"""Threads that a program does not find among its own: `threading.enumerate` doesn't list them.

Test suites, for one, fail a test that leaves a thread behind, and programs count theirs. What such
a thread runs must not ask for `threading.current_thread()`, as logging does: that would list it.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

_running: dict[int, str] = {}
os.register_at_fork(after_in_child=_running.clear)


class Thread:
    """As `threading.Thread`: a daemon, which the end of the process does not wait for."""

    def __init__(
        self, target: Callable[..., object], args: Sequence[Any] = (), *, name: str
    ) -> None:
        self.name = name
        self.native_id = 0
        self._target, self._args = target, args
        self._started, self._ended = threading.Event(), threading.Event()
        self._pid = 0

    def start(self) -> None:
        """Begin; once. Raises RuntimeError where the system has no thread left."""
        self._pid = os.getpid()
        _thread.start_new_thread(self._run, ())
        self._started.wait()

    def is_alive(self) -> bool:
        """Whether it runs; never in a child that was forked since."""
        return self._pid == os.getpid() and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, so many seconds at most."""
        if self.is_alive():
            self._ended.wait(timeout)

    def _run(self) -> None:
        ident = threading.get_ident()
        _running[ident] = self.name
        self.native_id = threading.get_native_id()
        self._started.set()
        try:
            self._target(*self._args)
        finally:
            _running.pop(ident, None)
            self._ended.set()


def names() -> dict[int, str]:
    """The names of those that run now, by Python's number of the thread."""
    return dict(_running)
