"""Python's search for cycles of garbage, while something is compiled.

A compiler makes objects by the hundred thousand, nearly all of which go as soon as nothing refers
to them. To search for cycles after each 700 of them took 7 to 10% of what small models' compiles
took, and of the tests of compiling; so it was 4%.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

OBJECTS = 50_000
"""Made and not gone again before the youngest are searched."""


@contextlib.contextmanager
def rarely() -> Iterator[None]:
    """While open, cycles are searched for after `OBJECTS` at the earliest, in all threads."""
    youngest, *others = gc.get_threshold()
    if 0 < youngest < OBJECTS:  # 0: the program has switched it off
        gc.set_threshold(OBJECTS, *others)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == OBJECTS:
            gc.set_threshold(youngest, *others)


def rarely_from_now_on() -> None:
    """In a process that only compiles: what is there now is never searched."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS, *gc.get_threshold()[1:])
