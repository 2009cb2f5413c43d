"""A run's saved reports, one for each rank that saved one, as one HTML page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepytorch_core import html_page
from deepytorch_core.config import Options
from deepytorch_core.topology import size_text

_DATA, _COLLECTIVES, _REST = "#e0a33e", "#4c86c6", "#9cc79a"
_KEPT, _OTHER = "#3a8f2e", "#b9b9b9"
_DELEGATE = "delegate"

Saved = Mapping[str, Any]


def write(path: Path, reports: Mapping[str, Saved]) -> None:
    """Write the page.

    Args:
        path: where to.
        reports: `deepytorch.report().to_dict()` of each rank, by the name to show.
    """
    first = next(iter(reports.values()))
    body = [f'<p class="verdict">{html.escape(headline(list(reports.values())))}</p>']
    body += ["<h2>Where the time goes</h2>", _times(reports)]
    body += ["<h2>What was decided</h2>", _decisions(first.get("decisions", ()))]
    body += ["<h2>Collectives</h2>", _collectives(first.get("rows", ()))]
    body += ["<h2>Options</h2>", _options(first.get("options", {}))]
    if len(reports) > 1:
        name = html.escape(next(iter(reports)))
        body.append(f'<p class="note">Decisions, collectives and options are those of {name}.</p>')
    html_page.write(
        path, title="deepytorch: report of a run", heading="Report of a run", body="\n".join(body)
    )


def headline(reports: Sequence[Saved]) -> str:
    """The run in a sentence or two."""
    native = sum(int(one["native_calls"]) for one in reports)
    delegated = sum(int(one["delegated_calls"]) for one in reports)
    calls = native + delegated
    share = f", {100 * native / calls:.0f}% of them native" if calls else ""
    text = f"{calls} collectives{share}"
    kept = [one for one in reports[0].get("decisions", ()) if _gain(one) is not None]
    gains = [gain for one in kept if (gain := _gain(one)) is not None and gain > 1]
    if gains:
        choices = "choices" if len(gains) > 1 else "choice"
        text += (
            f"; {len(gains)} {choices} faster than stock where measured, up to {max(gains):.2f}x"
        )
    waits = [_waited(one) for one in reports]
    if any(elapsed for _, elapsed in waits):
        worst = max(waited / elapsed for waited, elapsed in waits if elapsed)
        text += f"; at most {worst:.1%} of the time waits for data"
    return text + "."


def _waited(report: Saved) -> tuple[float, float]:
    """Seconds waited for batches, and from the first batch to the last, of the busiest loader."""
    loaders = report.get("loaders", ())
    found = max(loaders, key=lambda one: float(one["elapsed_s"]), default=None)
    return (float(found["waited_s"]), float(found["elapsed_s"])) if found else (0.0, 0.0)


def _native_s(report: Saved) -> float:
    rows = report.get("rows", ())
    return sum(float(row["time_us"]) for row in rows if row["algorithm"] != _DELEGATE) / 1e6


def _times(reports: Mapping[str, Saved]) -> str:
    """A bar for each rank: waiting for data, native collectives, and the rest between batches."""
    longest = max((_waited(one)[1] for one in reports.values()), default=0.0)
    rows = []
    for name, report in reports.items():
        waited, elapsed = _waited(report)
        native = _native_s(report)
        whole = longest or native
        if not whole:
            continue
        # Collectives run beside the computation where they can, so they are shown up to what is
        # left; more of them than that were hidden.
        shown = min(native, elapsed - waited) if elapsed else native
        rest = max(0.0, elapsed - waited - shown)
        parts = [
            (waited / whole, _DATA, f"waiting for data {waited:.2f} s"),
            (shown / whole, _COLLECTIVES, f"native collectives {native:.2f} s"),
            (rest / whole, _REST, f"the rest {rest:.2f} s"),
        ]
        words = f"{waited:.2f} s, {native:.2f} s, {rest:.2f} s"
        cells = f"<th>{html.escape(name)}</th><td>{html_page.bar(parts)}</td><td>{words}</td>"
        rows.append(f"<tr>{cells}</tr>")
    if not rows:
        return '<p class="note">Nothing was timed: no DataLoader and no native collective.</p>'
    keys = "".join(
        f'<span class="key" style="background:{color}"></span>{words}'
        for color, words in (
            (_DATA, "waiting for data"),
            (_COLLECTIVES, "native collectives (may run beside computation)"),
            (_REST, "the rest: computation, delegated collectives, overhead"),
        )
    )
    return f"<p>{keys}</p>\n<table>\n" + "\n".join(rows) + "\n</table>"


def _candidates(decision: Saved) -> dict[str, float]:
    """Times in ms by candidate, of a decision in Python or a plan of the native tuner's."""
    if "what" in decision:
        return {name: float(ms) for name, ms in decision["times_ms"].items()}
    times: dict[str, float] = {}
    for one in decision.get("candidates", ()):
        name = "stock" if one["algorithm"] == _DELEGATE else str(one["algorithm"])
        ms = float(one["median_us"]) / 1e3
        times[name] = min(ms, times.get(name, ms))  # the best of its parameters
    return times


def _chosen(decision: Saved) -> str:
    name = str(decision.get("chosen") or decision.get("algorithm") or "rule of thumb")
    return "stock" if name == _DELEGATE else name


def _gain(decision: Saved) -> float | None:
    """Stock's time over that of what was chosen, where both were measured."""
    times = _candidates(decision)
    if "stock" not in times or not times.get(_chosen(decision)):
        return None
    return times["stock"] / times[_chosen(decision)]


def _decisions(decisions: Sequence[Saved]) -> str:
    """Each with bars of its candidates' times, what stays in green, and what was dropped."""
    if not decisions:
        return '<p class="note">Nothing had to be decided.</p>'
    rows = []
    for one in decisions:
        times, chosen = _candidates(one), _chosen(one)
        slowest = max(times.values(), default=0.0)
        bars = []
        for name, ms in sorted(times.items(), key=lambda item: item[1]):
            color = _KEPT if name == chosen else _OTHER
            line = html_page.bar([(ms / slowest if slowest else 0.0, color, f"{ms:.3f} ms")])
            bars.append(
                f"<tr><td>{html.escape(name)}</td><td>{line}</td>"
                f'<td class="number">{ms:.3f} ms</td></tr>'
            )
        dropped = "".join(
            f"<br>dropped {html.escape(name)}: {html.escape(why)}"
            for name, why in one.get("dropped", {}).items()
        )
        why = html.escape(str(one.get("reason", "")))
        table = f"<table>{''.join(bars)}</table>" if bars else ""
        rows.append(
            f"<tr><th>{html.escape(_what(one))}</th>"
            f"<td><b>{html.escape(chosen)}</b>: {why}{dropped}{table}</td></tr>"
        )
    return '<div class="wide"><table>\n' + "\n".join(rows) + "\n</table></div>"


def _what(decision: Saved) -> str:
    if "what" in decision:
        return str(decision["what"])
    return (
        f"{decision['op']} of {decision['ranks']} ranks, from {size_text(decision['first_bytes'])}"
    )


def _collectives(rows: Sequence[Saved]) -> str:
    if not rows:
        return '<p class="note">None went through deepytorch.</p>'
    columns = ("group", "operation", "algorithm", "calls", "moved", "ms a call", "why")
    return html_page.table(
        columns,
        [
            (
                str(row["group"]),
                str(row["op"]),
                "stock" if row["algorithm"] == _DELEGATE else str(row["algorithm"]),
                str(row["calls"]),
                size_text(row["bytes"]),
                # What the stock backend does is not timed.
                f"{row['time_us'] / max(1, row['calls']) / 1e3:.3f}" if row["time_us"] else "",
                str(row["reason"]),
            )
            for row in rows
        ],
    )


def _options(options: Mapping[str, Any]) -> str:
    """Those that are not the default."""
    default = Options()
    rows = [
        (name, str(value))
        for name, value in options.items()
        if value != getattr(default, name, None)
    ]
    return html_page.fields(rows) if rows else '<p class="note">All have their defaults.</p>'
