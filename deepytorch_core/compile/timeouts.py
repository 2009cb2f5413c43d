"""Collectives wait longer while a rank may be compiling.

The ranks that are ready wait in a collective for the one that is not. So all raise the time limits
of their groups before the first compile, by what compiling may take, and lower them after the last.
A rank sees its own compiles: it takes one as a sign that others compile in the same step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from deepytorch_core.c10d.backend import timeout_of

# Steps in which a compile is followed by others: of backward graphs, and for other sizes.
HELD_STEPS = 3


def hold_off(seconds: float) -> Callable[[], None]:
    """Raise the time limit of every process group by `seconds`; returns what lowers it again."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return lambda: None
    raised: list[_Limit] = []
    for group in list(c10d._world.pg_map):
        for backend in _backends(group):
            limit = _limits.get(id(backend)) or _Limit.of(backend)
            if limit is not None:
                limit.holds.append(seconds)
                limit.set()
                _limits[id(backend)] = limit
                raised.append(limit)

    def lower() -> None:
        while raised:
            limit = raised.pop()
            limit.holds.remove(seconds)
            limit.set()
            if not limit.holds:
                _limits.pop(id(limit.backend), None)

    return lower


class Hold:
    """Time limits held off from each compile of a model's regions until they have run compiled.

    Args:
        seconds: what compiling all of them may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls_left: dict[object, int] = {}
        self._lower: Callable[[], None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether limits are raised."""
        return self._lower is not None

    def begin(self, what: object, num_modules: int) -> None:
        """`what` compiles now; its `num_modules` modules are called once in a step."""
        self._calls_left[what] = HELD_STEPS * num_modules
        if self._lower is None:
            self._lower = lower = hold_off(self._seconds)
            # A model may go before its steps are over.
            weakref.finalize(self, lower).atexit = False

    def on_call(self, what: object) -> None:
        """A module of `what` is called."""
        if what in self._calls_left:
            self._calls_left[what] -= 1
            if self._calls_left[what] <= 0:
                self.end(what)

    def end(self, what: object) -> None:
        """`what` compiles nothing any more."""
        self._calls_left.pop(what, None)
        if self._lower is not None and not self._calls_left:
            self._lower()
            self._lower = None


@dataclass
class _Limit:
    """A backend's own time limit, and what several compiles that go on have asked for."""

    backend: Any  # kept, so that no other has its address
    set_timeout: Callable[[timedelta], None]
    own: timedelta
    now: timedelta
    holds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, backend: Any) -> _Limit | None:
        limit = timeout_of(backend)
        # Ours and newer torch's own have the first, older ones the second.
        set_timeout = getattr(backend, "set_timeout", None)
        set_timeout = set_timeout or getattr(backend, "_set_default_timeout", None)
        if limit is None or set_timeout is None:
            return None
        return cls(backend, set_timeout, limit, limit)

    def set(self) -> None:
        """Put the limit in force that the holds ask for, unless the program has set another."""
        if timeout_of(self.backend) == self.now:
            self.now = self.own + timedelta(seconds=max(self.holds, default=0.0))
            self.set_timeout(self.now)


_limits: dict[int, _Limit] = {}


def _backends(group: Any) -> list[Any]:
    found: list[Any] = []
    for device in getattr(group, "_device_types", ()):
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # none for this device
            continue
        if all(backend is not other for other in found):
            found.append(backend)
    return found
