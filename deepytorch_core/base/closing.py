"""The one line at a run's end: what was switched on, and what that gave."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from typing import Any

from deepytorch_core.base import decisions
from deepytorch_core.base.console import say_once
from deepytorch_core.base.errors import OFF_SWITCH

_MOST = 6
_asked_by: int | None = None


def say_at_exit(is_active: Callable[[], bool]) -> None:
    """Have rank 0 say it when this process ends by itself. A second call does nothing.

    Args:
        is_active: whether anything is still switched on by then.
    """
    global _asked_by
    if _asked_by is None:
        _asked_by = os.getpid()
        atexit.register(_say, is_active)


def _say(is_active: Callable[[], bool]) -> None:
    told = line(decisions.made())
    # A forked child has its parent's choices.
    if told is not None and is_active() and os.getpid() == _asked_by:
        say_once(told)


def line(made: tuple[dict[str, Any], ...]) -> str | None:
    """Say what was switched on, with measured times; None where all is stock's."""
    last = {decision["what"]: decision for decision in made}
    kept = [decision for decision in last.values() if not decisions.is_stock(decision)]
    if not kept:
        return None
    shown = [
        f"{decision['what']}: {decision['chosen']}{_gain(made, decision)}"
        for decision in kept[:_MOST]
    ]
    more = [f"{len(kept) - _MOST} more (deepytorch.report())"] if len(kept) > _MOST else []
    return f"switched on: {', '.join([*shown, *more])}; {OFF_SWITCH}"


def _gain(made: tuple[dict[str, Any], ...], kept: Mapping[str, Any]) -> str:
    """As it was measured in this run, where it was."""
    for decision in reversed(made):
        times = decision["times_ms"] if decision["what"] == kept["what"] else {}
        before = next((ms for name, ms in times.items() if decisions.is_stock_name(name)), None)
        after = times.get(kept["chosen"])
        if before is not None and after is not None:
            return f" ({before:.3g} -> {after:.3g} ms)"
    return ""
