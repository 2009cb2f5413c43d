"""The decisions of a saved report: what was measured, what stays, and how they look on a page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from deepytorch_core.base.decisions import is_stock
from deepytorch_core.report import html_page
from deepytorch_core.topology.model import size_text

DELEGATE = "delegate"
_PARAMETERS = ("algorithm", "chunk_bytes", "channels", "threads", "delegated")

Saved = Mapping[str, Any]


def shown_name(algorithm: str | None) -> str:
    """As it is called where people read it."""
    return "stock" if algorithm == DELEGATE else str(algorithm)


def candidates(decision: Saved) -> dict[str, float]:
    """Times in ms by candidate, of a decision in Python or a plan of the native tuner's.

    An algorithm that was tried with several parameters has the time of those that were chosen, or
    else its best.
    """
    if "what" in decision:
        return {name: float(ms) for name, ms in decision["times_ms"].items()}
    times: dict[str, float] = {}
    for candidate in decision.get("candidates", ()):
        name = shown_name(candidate["algorithm"])
        ms = float(candidate["median_us"]) / 1e3
        times[name] = min(ms, times.get(name, ms))
    own = next(
        (
            float(candidate["median_us"]) / 1e3
            for candidate in decision.get("candidates", ())
            if all(candidate.get(name) == decision.get(name) for name in _PARAMETERS)
        ),
        None,
    )
    return times if own is None else {**times, chosen(decision): own}


def chosen(decision: Saved) -> str:
    """The candidate that stays."""
    return shown_name(decision.get("chosen") or decision.get("algorithm") or "rule of thumb")


def gain(decision: Saved) -> float | None:
    """Stock's time over that of what was chosen, where both were measured."""
    times = candidates(decision)
    if "stock" not in times or not times.get(chosen(decision)):
        return None
    return times["stock"] / times[chosen(decision)]


def section(decisions: Sequence[Saved]) -> str:
    """Each with bars of its candidates' times, what stays in green, and what was dropped."""
    if not decisions:
        return '<p class="note">Nothing had to be decided.</p>'
    left = sum(map(is_stock, decisions))
    counts = f"{len(decisions)} in all: {len(decisions) - left} kept, {left} left to stock."
    return f'<p class="note">{counts}</p>\n' + "\n".join(
        _choice(decision) for decision in decisions
    )


def _choice(decision: Saved) -> str:
    times, name = candidates(decision), chosen(decision)
    slowest = max(times.values(), default=0.0)
    lines = []
    for candidate, ms in sorted(times.items(), key=lambda item: item[1]):
        color = "var(--kept)" if candidate == name else "var(--other)"
        bar = html_page.bar([(ms / slowest if slowest else 0.0, color, f"{ms:.3f} ms")])
        lines.append((candidate, bar, f"{ms:.3f} ms"))
    ratio = gain(decision)
    is_better = ratio is not None and ratio > 1
    tag = f"{ratio:.2f}x stock's speed" if is_better else name
    kind = "tag kept" if is_better else "tag"
    dropped = "".join(
        f"<p>dropped {html.escape(candidate)}: {html.escape(why)}</p>"
        for candidate, why in decision.get("dropped", {}).items()
    )
    why = html.escape(str(decision.get("reason", "")))
    return (
        f'<div class="choice"><p><span class="what">{html.escape(_what(decision))}</span> '
        f'<span class="{kind}">{html.escape(tag)}</span><br>'
        f"<b>{html.escape(name)}</b>: {why}</p>{dropped}"
        f"{html_page.rows(lines) if lines else ''}</div>"
    )


def _what(decision: Saved) -> str:
    if "what" in decision:
        return str(decision["what"])
    return (
        f"{decision['op']} of {decision['ranks']} ranks, from {size_text(decision['first_bytes'])}"
    )
