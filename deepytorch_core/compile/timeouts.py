"""Collectives wait longer while a rank may be compiling.

The ranks that are ready wait in a collective for the one that is not, so all raise the time limits
of their groups before the first compile, by what compiling may take, and lower them after the last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


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
        limit = _current(backend)
        # Ours and newer torch's own have the first, older ones the second.
        set_timeout = getattr(backend, "set_timeout", None)
        set_timeout = set_timeout or getattr(backend, "_set_default_timeout", None)
        if limit is None or set_timeout is None:
            return None
        return cls(backend, set_timeout, limit, limit)

    def set(self) -> None:
        """Put the limit in force that the holds ask for, unless the program has set another."""
        if _current(self.backend) == self.now:
            self.now = self.own + timedelta(seconds=max(self.holds, default=0.0))
            self.set_timeout(self.now)


_limits: dict[int, _Limit] = {}


def _current(backend: Any) -> Any:
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _backends(group: Any) -> list[Any]:
    found: list[Any] = []
    for device in getattr(group, "_device_types", ()):
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # none for this device
            continue
        if all(backend is not one for one in found):
            found.append(backend)
    return found
