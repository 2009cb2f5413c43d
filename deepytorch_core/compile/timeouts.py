"""Collectives wait longer while a rank may be compiling.

The ranks that are ready wait in a collective for the one that is not, so all raise the time limits
of their groups before the first compile, by what compiling may take, and lower them after the last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def hold_off(seconds: float) -> Callable[[], None]:
    """Raise the time limit of every process group by `seconds`; returns what lowers it again."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return lambda: None
    raised: list[tuple[Any, timedelta]] = []
    for group in list(c10d._world.pg_map):
        for backend in _backends(group):
            limit = getattr(getattr(backend, "options", None), "_timeout", None)
            # Ours and newer torch's own have the first, older ones the second.
            set_timeout = getattr(backend, "set_timeout", None)
            set_timeout = set_timeout or getattr(backend, "_set_default_timeout", None)
            if limit is None or set_timeout is None:
                continue
            set_timeout(limit + timedelta(seconds=seconds))
            raised.append((set_timeout, limit))

    def lower() -> None:
        while raised:
            set_timeout, limit = raised.pop()
            set_timeout(limit)

    return lower


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
