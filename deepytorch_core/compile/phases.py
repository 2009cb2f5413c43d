"""The time of a trial by its phases: seconds and steps of each, for people who wonder."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Spent:
    """Time and steps that a phase has taken so far."""

    seconds: float = 0.0
    steps: int = 0


class Phases:
    """Counts from one step's beginning to the next one's; a GPU may be behind by a step."""

    def __init__(self) -> None:
        self._spent: dict[str, Spent] = {}
        self._now: str | None = None
        self._since = 0.0

    def enter(self, name: str | None) -> None:
        """The step that begins now belongs to that phase; None: there is no further step."""
        now = time.perf_counter()
        if self._now is not None:
            spent = self._spent.setdefault(self._now, Spent())
            spent.seconds += now - self._since
            spent.steps += 1
        self._now, self._since = name, now

    @property
    def spent(self) -> dict[str, Spent]:
        """By the names of the phases, in the order in which they were first over."""
        return dict(self._spent)


@dataclass(frozen=True)
class OpenTrial:
    """An open decision about a model.

    Attributes:
        what: the decision's name.
        is_begun: whether steps are compiled already, in turns with eager ones.
        step: forward passes of the training so far.
        last_step: after how many it is decided at the latest, as far as is known.
    """

    what: str
    is_begun: bool
    step: int
    last_step: int
