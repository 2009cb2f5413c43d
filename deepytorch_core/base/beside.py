"""Work of the host for which it has time while the GPU is busy with a pass that was replayed.

A replayed pass takes the host one launch. What the training does next mostly waits for its result.
"""

from __future__ import annotations

from collections.abc import Callable

from deepytorch_core.base import console

_work: list[Callable[[], None]] = []


def add(work: Callable[[], None]) -> Callable[[], None]:
    """Have `work` done after each launch of a replayed forward pass; returns what ends that."""
    _work.append(work)

    def end() -> None:
        if work in _work:
            _work.remove(work)

    return end


def launched() -> None:
    """A forward pass was launched. Work that fails is not done again, and says so."""
    for work in list(_work):
        try:
            work()
        except Exception as error:  # the script has asked for none of it
            _work.remove(work)
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            console.say_first(f"work beside the GPU's ends: {why}")
