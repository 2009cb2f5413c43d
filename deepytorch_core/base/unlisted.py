"""Threads that a program does not find among its own: `threading.enumerate` doesn't list them.

Test suites, for one, fail a test that leaves a thread behind, and programs count theirs. What such
a thread runs must not ask for `threading.current_thread()`, as logging does: that would list it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

_running: dict[int, str] = {}
os.register_at_fork(after_in_child=_running.clear)
_threading: Any = threading


class Thread(threading.Thread):
    """A daemon, which the end of the process does not wait for."""

    def __init__(
        self, target: Callable[..., object], args: Sequence[Any] = (), *, name: str
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._is_hidden = threading.Event()
        self._pid = 0

    def start(self) -> None:
        """Begin; once. Raises RuntimeError where the system has no thread left."""
        self._pid = os.getpid()
        super().start()
        self._is_hidden.wait()

    def is_alive(self) -> bool:
        """Whether it runs; never in a child that was forked since."""
        return self._pid == os.getpid() and super().is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, so many seconds at most."""
        if self.is_alive():
            super().join(timeout)

    def run(self) -> None:
        """Do the thread's work."""
        ident = threading.get_ident()
        self._delete()
        _running[ident] = self.name
        self._is_hidden.set()
        try:
            super().run()
        finally:
            _running.pop(ident, None)

    def _delete(self) -> None:
        """Off the list, where the base class wants to find it at the end, too."""
        with _threading._active_limbo_lock:
            _threading._active.pop(threading.get_ident(), None)


def names() -> dict[int, str]:
    """The names of those that run now, by Python's number of the thread."""
    return dict(_running)
