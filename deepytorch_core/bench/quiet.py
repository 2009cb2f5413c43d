"""Benchmarks of one machine that take turns: none is timed while another one warms up or is."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from deepytorch_core.base import config


class Quiet:
    """One benchmark's place among those that this user runs on this machine.

    Args:
        descriptor: of the file that all of them lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def warm_up(self) -> None:
        """Beside others that warm up. Waits while one is timed."""
        self._lock(fcntl.LOCK_SH)

    def time(self) -> None:
        """Alone, until the end. Waits for all others that warm up or are timed."""
        self._lock(fcntl.LOCK_EX)

    def _lock(self, kind: int) -> None:
        with contextlib.suppress(OSError):  # no locks on this file system: as if alone
            fcntl.flock(self._descriptor, kind)


@contextlib.contextmanager
def turns(path: Path | None = None) -> Iterator[Quiet]:
    """A place among the benchmarks that lock `path`, until the end.

    The default is one file for each user. Raises OSError where it can't be opened.
    """
    path = path or config.temporary_dir() / f"deepytorch-bench-{os.getuid()}.lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield Quiet(descriptor)
    finally:
        os.close(descriptor)
