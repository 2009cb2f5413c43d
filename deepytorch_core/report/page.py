"""A run's saved reports, one for each rank that saved one, as one HTML page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepytorch_core.base.config import Options
from deepytorch_core.metering.step_timer import parts_of, timed_part
from deepytorch_core.report import html_page
from deepytorch_core.report import plots as report_plots
from deepytorch_core.report import scaling as report_scaling
from deepytorch_core.report.choices import DELEGATE, candidates, gain, section, shown_name
from deepytorch_core.topology.model import size_text

_PARTS = {
    "compute": ("var(--compute)", "computing, and what is not listed"),
    "exposed": ("var(--exposed)", "exposed communication"),
    "data": ("var(--data)", "waiting for data"),
    "overhead": ("var(--overhead)", "overhead: deepytorch measuring collectives"),
}

Saved = Mapping[str, Any]


def write(
    path: Path,
    reports: Mapping[str, Saved],
    comparisons: Sequence[Saved] = (),
    *,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write the page.

    Args:
        path: where to.
        reports: `deepytorch.report().to_dict()` of each rank, by the name to show.
        comparisons: what `deepytorch run --compare --json` wrote, of the same script.
        origin: where the reports come from, as `run_folder` writes it.
    """
    body = [f'<p class="verdict">{html.escape(line)}</p>' for line in _against_stock(comparisons)]
    if reports:
        body.append(f'<p class="verdict">{html.escape(headline(list(reports.values())))}</p>')
        body += ["<h2>Where the time goes</h2>", _times(reports)]
    body += _losses(reports, comparisons)
    if reports:
        body += ["<h2>Memory</h2>", _memory(reports), "<h2>Stragglers</h2>", _stragglers(reports)]
        body += ["<h2>Will it scale?</h2>", report_scaling.section(list(reports.values()))]
        first = next(iter(reports.values()))
        body += ["<h2>What was decided</h2>", section(first.get("decisions", ()))]
        body += ["<h2>Collectives</h2>", _collectives(first.get("rows", ()))]
        body += ["<h2>Options</h2>", _options(first.get("options", {}))]
    if len(reports) > 1:
        name = html.escape(next(iter(reports)))
        body.append(f'<p class="note">Decisions, collectives and options are those of {name}.</p>')
    if origin is not None:
        body += ["<h2>Where this comes from</h2>", _origin(origin)]
    html_page.write(
        path, title="deepytorch: report of a run", heading="Report of a run", body="\n".join(body)
    )


def _against_stock(comparisons: Sequence[Saved]) -> list[str]:
    """List the findings of running the script with and without deepytorch."""
    return [_verdict(verdict) for found in comparisons for verdict in found["verdicts"]]


def _verdict(verdict: Saved) -> str:
    apart = verdict.get("losses", {}).get("apart")
    if apart is not None:
        return f"{verdict['arm']}: {verdict['word']}, so no speed-up is claimed: {apart}."
    low, high = verdict["spread"]
    return (
        f"{verdict['arm']}: {verdict['speedup']:.2f}x stock's speed ({low:.2f} to {high:.2f}), "
        f"{verdict['word']}."
    )


def headline(reports: Sequence[Saved]) -> str:
    """The run in some sentences."""
    native = sum(int(report["native_calls"]) for report in reports)
    calls = native + sum(int(report["delegated_calls"]) for report in reports)
    share = f", {100 * native / calls:.0f}% of them native" if calls else ""
    sentences = [*_pace(reports), f"{calls} collectives{share}"]
    gains = [
        found
        for decision in reports[0].get("decisions", ())
        if (found := gain(decision)) is not None
    ]
    better = [found for found in gains if found > 1]
    if better:
        choices = "choices" if len(better) > 1 else "choice"
        sentences[-1] += (
            f"; {len(better)} {choices} faster than stock where measured, up to {max(better):.2f}x"
        )
    saved = max(saved_s(report) for report in reports)
    if saved >= 0.1:
        sentences.append(
            f"Native collectives took {saved:.1f} s less than the stock backend's would have, by "
            "the times that were measured for their sizes"
        )
    failures = sum(int(report.get("failures", 0)) for report in reports)
    if failures:
        sentences.append(f"{failures} operations ended in an error")
    return ". ".join(sentences) + "."


def _pace(reports: Sequence[Saved]) -> list[str]:
    """How long a step takes, and what of it is not computing, on the rank where that is most."""
    timed = [course for report in reports if (course := timed_part(report)) is not None]
    if not timed:
        return []
    slowest = max(timed, key=lambda part: part["seconds"] / part["timed_steps"])
    text = f"{slowest['steps']} steps of {1e3 * slowest['seconds'] / slowest['timed_steps']:.1f} ms"
    shares = [
        f"{share:.0%} {words}"
        for key, words in (("exposed", "exposed communication"), ("data", "waiting for data"))
        if (share := max(parts_of(part)[key] / part["seconds"] for part in timed)) >= 0.005
    ]
    return [f"{text}, of it at most {' and '.join(shares)}" if shares else text]


def saved_s(report: Saved) -> float:
    """Return the seconds that native collectives took less than stock's by the tuner's times.

    Each kind of operation counts with its mean size. Not all of it is gained by the run: operations
    hidden behind computation cost nothing either way.
    """
    total = 0.0
    for row in report.get("rows", ()):
        if row["algorithm"] == DELEGATE or not row["calls"]:
            continue
        size = row["bytes"] / row["calls"]
        for plan in report.get("decisions", ()):
            if plan.get("op") != row["op"] or "what" in plan or gain(plan) is None:
                continue
            if plan["first_bytes"] <= size <= plan["last_bytes"]:
                times = candidates(plan)
                own_ms = times.get(row["algorithm"], times["stock"])
                total += max(0.0, times["stock"] - own_ms) * row["calls"] / 1e3
                break
    return total


def _times(reports: Mapping[str, Saved]) -> str:
    """A bar for each rank, as long as its steps took."""
    timed = {
        name: course
        for name, report in reports.items()
        if (course := timed_part(report)) is not None
    }
    if not timed:
        return '<p class="note">Nothing was timed: no optimizer took two steps.</p>'
    longest = max(course["seconds"] for course in timed.values())
    lines = []
    for name, course in timed.items():
        parts = parts_of(course)
        bar = html_page.bar(
            [
                (seconds / longest, _PARTS[key][0], f"{_PARTS[key][1]} {seconds:.2f} s")
                for key, seconds in parts.items()
            ]
        )
        words = [f"{name} {parts[name] / course['seconds']:.1%}" for name in ("exposed", "data")]
        lines.append((name, bar, f"{course['seconds']:.1f} s, {', '.join(words)}"))
    text = html_page.keys(list(_PARTS.values())) + html_page.rows(lines)
    tuning_s = max(course.get("all_tuning_s", 0.0) for course in timed.values())
    if tuning_s:
        text += (
            f'\n<p class="note">Measuring collectives took {tuning_s:.1f} s in all; what came '
            "before the first step's end is not in the bars.</p>"
        )
    if any(report.get("memory", {}).get("devices") for report in reports.values()):
        text += (
            '\n<p class="note">Collectives on GPUs run on streams, where no thread waits for them: '
            "what of them is exposed is part of computing here.</p>"
        )
    return text


def _losses(reports: Mapping[str, Saved], comparisons: Sequence[Saved]) -> list[str]:
    """The losses of all runs that are known, laid over each other; nothing where none is."""
    named = [
        (str(run["arm"]), list(enumerate(run["losses"], start=1)))
        for comparison in comparisons
        for run in comparison["runs"]
    ]
    named += [
        (name, report.get("course", {}).get("losses", ())) for name, report in reports.items()
    ]
    known = [
        (name, [(float(x), float(y)) for x, y in points if y is not None]) for name, points in named
    ]
    drawing = report_plots.curves(known)
    return ["<h2>Losses</h2>", drawing] if drawing else []


def _memory(reports: Mapping[str, Saved]) -> str:
    """A bar for what each process and each of its GPUs used at most."""
    found = {name: report.get("memory", {}) for name, report in reports.items()}
    hosts = [usage["host_peak_bytes"] for usage in found.values() if "host_peak_bytes" in usage]
    lines = []
    for name, usage in found.items():
        for gpu in usage.get("devices", ()):
            parts = [
                (gpu["peak_bytes"], "var(--memory)", "allocated"),
                (gpu["reserved_bytes"] - gpu["peak_bytes"], "var(--other)", "reserved besides"),
            ]
            shares = [
                (size / gpu["total_bytes"], color, f"{words} {size_text(size)}")
                for size, color, words in parts
            ]
            words = f"{size_text(gpu['peak_bytes'])} of {size_text(gpu['total_bytes'])}"
            lines.append((f"{name}, {gpu['device']}", html_page.bar(shares), words))
        if "host_peak_bytes" in usage:
            peak = usage["host_peak_bytes"]
            words = size_text(peak)
            if usage.get("registered_bytes"):
                words += f", registered {size_text(usage['registered_bytes'])}"
            bar = html_page.bar([(peak / max(hosts), "var(--memory)", size_text(peak))])
            lines.append((f"{name}, host", bar, words))
    if not lines:
        return '<p class="note">Not known.</p>'
    note = "At most at once; a GPU's bar is as long as what it has, reserved memory in grey."
    return f'{html_page.rows(lines)}\n<p class="note">{note}</p>'


def _stragglers(reports: Mapping[str, Saved]) -> str:
    """Show who was waited for, and who waited, over the run."""
    ranks = {name: report.get("course", {}).get("buckets", ()) for name, report in reports.items()}
    held = report_plots.heat_map(ranks, "held_s")
    waited = report_plots.heat_map(ranks, "waited_s")
    if not held and not waited:
        return (
            '<p class="note">No waiting was seen. It is that of native operations on host memory.'
            "</p>"
        )
    text = ""
    if held:
        text += f"<h3>How long all others together waited for this rank alone</h3>\n{held}\n"
    if waited:
        text += f"<h3>How long this rank waited for others</h3>\n{waited}"
    return text


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
                shown_name(row["algorithm"]),
                str(row["calls"]),
                size_text(row["bytes"]),
                # The stock backend's work is not timed.
                f"{row['time_us'] / max(1, row['calls']) / 1e3:.3f}" if row["time_us"] else "",
                str(row["reason"]),
            )
            for row in rows
        ],
    )


def _origin(origin: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    rows = [
        ("script", str(origin["script"])),
        ("commit of the script", origin["script_commit"] or "it is in no repository"),
        ("command", origin["command"]),
        ("ranks", str(origin["ranks"])),
        ("machine", origin["machine"]["name"]),
        ("versions", versions),
        ("commit of deepytorch", origin["commit"]),
    ]
    return html_page.fields(rows)


def _options(options: Mapping[str, Any]) -> str:
    """Those that are not the default."""
    default = Options()
    rows = [
        (name, str(value))
        for name, value in options.items()
        if value != getattr(default, name, None)
    ]
    return html_page.fields(rows) if rows else '<p class="note">All have their defaults.</p>'
