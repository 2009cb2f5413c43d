"""Choices that were made in Python for this job; `deepytorch.report()` lists them.

What the native tuner settled on is kept by the core, see `_core.plans()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepytorch_core.base.console import say_once

_made: list[dict[str, Any]] = []

# The chosen one has such a name if all is left as it would be without deepytorch.
_STOCK = frozenset({"stock", "off", "delegate", "eager", "launched", "padded"})


def record(
    what: str,
    chosen: str,
    reason: str,
    *,
    times_ms: Mapping[str, float] | None = None,
    dropped: Mapping[str, str] | None = None,
) -> None:
    """Note a choice, and say it in one line: once in a process that makes the same again.

    Args:
        what: what was chosen for: "DDP buckets".
        chosen: the candidate that stays.
        reason: why that one.
        times_ms: the candidates' median times in milliseconds; none when nothing was measured,
            then the line is for option log=debug.
        dropped: candidates that could not stay whatever their time, and why.
    """
    decision = {"what": what, "chosen": chosen, "reason": reason, "times_ms": dict(times_ms or {})}
    if dropped:
        decision["dropped"] = dict(dropped)
    is_new = not any(_is_same(decision, earlier) for earlier in _made)
    _made.append(decision)
    if is_new:
        say_once(sentence(decision), level="info" if times_ms or dropped else "debug")


def _is_same(decision: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether they differ in their times at most."""
    return all(decision[name] == other[name] for name in ("what", "chosen", "reason"))


def made() -> tuple[dict[str, Any], ...]:
    """All choices so far, the oldest first."""
    return tuple(dict(decision) for decision in _made)


def is_stock(decision: Mapping[str, Any]) -> bool:
    """Whether stock stays: of a choice in Python, or a plan of the native tuner's."""
    chosen = decision.get("chosen") if "what" in decision else decision.get("algorithm")
    return is_stock_name(chosen)


def is_stock_name(chosen: str | None) -> bool:
    """Whether a candidate of this name leaves all as it would be without deepytorch."""
    return chosen in _STOCK


def sentence(decision: Mapping[str, Any]) -> str:
    """A choice as one line."""
    times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in decision["times_ms"].items())
    dropped = "".join(
        f"; dropped {name}: {why}" for name, why in decision.get("dropped", {}).items()
    )
    return f"{decision['what']}: {decision['chosen']}, {decision['reason']}" + (
        f" ({times}){dropped}" if times else dropped
    )
