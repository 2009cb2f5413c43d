"""One line for a step that waits for the compiler, when that takes a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from deepytorch_core.base import console

LONG_S = 2.0


@contextlib.contextmanager
def said(name: str, most_s: float) -> Iterator[None]:
    """Say once on rank 0 that the region `name` is being compiled, after `LONG_S` seconds of it.

    `most_s` is how many seconds it may take in all.
    """
    if console.global_rank() != 0:
        yield
        return
    timer = threading.Timer(LONG_S, _say, (name, most_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _say(name: str, most_s: float) -> None:
    console.say_first(
        f"compile: the step waits while {name} is compiled: often under a minute, about "
        f"{most_s:g} s at most; torch keeps the code for later runs"
    )
