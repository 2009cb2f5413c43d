"""The few lines that deepytorch prints by itself, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from deepytorch_core import config

_LEVELS = ("debug", "info", "warning", "error")

_joined_as: int | None = None
_when_joined: list[Callable[[], object]] = []


def say(text: str, *, level: str = "info") -> None:
    """Print one line, whatever the rank, if option `log` lets `level` through."""
    if _LEVELS.index(level) < _LEVELS.index(config.current().log):
        return
    # In one write, so that lines of several ranks don't mix.
    sys.stderr.write(f"deepytorch: {text}\n")
    sys.stderr.flush()


def say_once(text: str, *, level: str = "info") -> None:
    """Print one line on rank 0 only."""
    if global_rank() == 0:
        say(text, level=level)


def joined_as(rank: int) -> None:
    """Note this process's rank in the default group that is being made.

    Nothing else tells it before that group is there, nor when it is gone again, where a process was
    started by spawn or fork, or by a framework that gives its ranks no RANK.
    """
    global _joined_as
    _joined_as = rank
    for act in _when_joined:
        act()


def when_joined(act: Callable[[], object]) -> None:
    """Have `act` called whenever this process's rank is noted."""
    if act not in _when_joined:
        _when_joined.append(act)


def has_joined() -> bool:
    """Whether this process has or had a default group, which says what its rank is."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return _joined_as is not None or (c10d is not None and bool(c10d.is_initialized()))


def global_rank() -> int:
    """This process's rank: torch.distributed's, now or last; before any group the launcher's."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and c10d.is_initialized():
        return int(c10d.get_rank())
    return config.rank() if _joined_as is None else _joined_as
