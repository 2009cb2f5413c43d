"""Bars of measured ratios: records that can stand beside each other, and a drawing of them.

Between `<!-- chart:begin FILE SETTING... to=PICTURE -->` and `<!-- chart:end -->` a page has the
picture with its caption; `python -m deepytorch_core.bench.tables --write PAGE` makes both.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import pairs
from deepytorch_core.bench.job import format_size

END = "<!-- chart:end -->"
_SECTION = re.compile(
    r"<!-- chart:begin (?P<file>[\w.-]+) (?P<settings>[^>]+) to=(?P<picture>\S+) -->\n"
    r".*?<!-- chart:end -->",
    re.DOTALL,
)
_MARKER = re.compile(r"<!-- chart:(begin|end)\b")

Bar = tuple[float, float, float]
"""A ratio with its lower and upper quartile."""


@dataclass(frozen=True)
class Chart:
    """Bars of one machine, one commit and one baseline.

    Attributes:
        baseline: what each bar is a multiple of the speed of.
        series: what is compared with it; every row has a bar of each.
        rows: the bars by label.
        origin: machine, version of torch and commit, in words.
        title: the file and the settings.
    """

    baseline: str
    series: tuple[str, ...]
    rows: Mapping[str, tuple[Bar, ...]]
    origin: str
    title: str

    @property
    def widest(self) -> float:
        return max(1.0, *(bar[2] for bars in self.rows.values() for bar in bars))

    @property
    def caption(self) -> str:
        return (
            f"Times faster than {self.baseline}, which is the dashed line; thin lines span the "
            f"quartiles. {self.origin}."
        )


def select(files: Mapping[str, Sequence[Record]], file: str, settings: str) -> Chart:
    """Bars of the records of `file` whose fields are as `settings` say, such as `op=all_reduce`.

    Settings are `name=value`, separated by blanks. A later record of the same case replaces an
    earlier one; of wrong results nothing is claimed.

    Raises ValueError for a file that is not there and when no record fits. It also does so where
    those that fit differ in what they are compared with, in registration, timing, machine or
    commit: bars beside each other would be read as if they agreed.
    """
    wanted = dict(setting.split("=", 1) for setting in settings.split())
    if file not in files:
        raise ValueError(f"there is no {file} among the results")
    fitting = [
        record
        for record in files[file]
        if not record["wrong"] and all(_is(record, *setting) for setting in wanted.items())
    ]
    if not fitting:
        raise ValueError(f"no record of {file} that is right has {settings}")
    for what, field in _ALIKE.items():
        values = list(dict.fromkeys(str(field(record)) for record in fitting))
        if len(values) > 1:
            raise ValueError(
                f"{file}, {settings}: records differ in {what}: {', '.join(values)}; "
                "choose some by a setting"
            )
    series, bars_of = _KINDS.get(fitting[0].get("bench", ""), (("deepytorch",), _single_bar))
    rows = {_label(record, wanted): bars_of(record) for record in fitting}
    first = fitting[0]
    machine, torch = first["machine"]["name"], first["versions"]["torch"]
    origin = f"{machine}, torch {torch}, commit {first['commit']}"
    return Chart(_baseline(first), series, rows, origin, f"{file}, {settings}")


def replace(text: str, files: Mapping[str, Sequence[Record]]) -> tuple[str, dict[str, str]]:
    """`text` with its pictures and captions, and the pictures as SVG by their paths.

    Raises ValueError unless the markers come in pairs, and as `select` does.
    """
    if len(_MARKER.findall(text)) != 2 * len(_SECTION.findall(text)):
        raise ValueError(f"a chart needs to=PICTURE in its first marker and one {END} after it")
    pictures = {}

    def section(match: re.Match[str]) -> str:
        chart = select(files, match["file"], match["settings"])
        pictures[match["picture"]] = svg(chart)
        first = match[0].partition("\n")[0]
        alt = f"{' and '.join(chart.series)}: times faster than {chart.baseline}"
        return f"{first}\n![{alt}]({match['picture']})\n\n{chart.caption}\n{END}"

    return _SECTION.sub(section, text), pictures


def _is(record: Record, name: str, value: str) -> bool:
    return str(record.get(name)).lower() == value.lower()


def _baseline(record: Record) -> str:
    if record.get("bench") == "workload":
        return "the plain script"
    return str(record["stock"] if record.get("bench") == "compile" else record["baseline"])


_ALIKE: Mapping[str, Callable[[Record], Any]] = {
    "what they are compared with": _baseline,
    "registration": lambda record: record.get("registered"),
    "timing (cuda_graph)": lambda record: record.get("cuda_graph"),
    "machine": lambda record: record["machine"]["name"],
    "emulation": lambda record: record.get("emulated"),
    "commit": lambda record: record["commit"],
    "torch": lambda record: record["versions"]["torch"],
    "benchmark": lambda record: record.get("bench"),
}


def _single_bar(record: Record) -> tuple[Bar, ...]:
    return ((record["speedup"], *record["speedup_spread"]),)


def _compiled(record: Record) -> tuple[Bar, ...]:
    theirs = (record["plain_speedup"], *record["plain_speedup_spread"])
    return (theirs, *_single_bar(record))


def _workload(record: Record) -> tuple[Bar, ...]:
    arms = [arm for arm in (record["tuned"], "ours") if arm]
    bars = [pairs.of_record(record, "plain", arm) for arm in arms]
    found = tuple((bar[0], bar[1], bar[2]) for bar in bars if bar)
    if len(found) != 2:
        raise ValueError(f"{record['workload']} has no plain, tuned and ours to compare")
    return found


_KINDS: Mapping[str, tuple[tuple[str, ...], Callable[[Record], tuple[Bar, ...]]]] = {
    "compile": (("torch.compile (tuned)", "deepytorch"), _compiled),
    "workload": (("tuned", "deepytorch"), _workload),
}


def _label(record: Record, wanted: Mapping[str, str]) -> str:
    """Return what tells the record from its neighbours: not what all have in common."""
    if "op" in record:
        size = format_size(record["bytes"])
        return size if "op" in wanted else f"{record['op']}, {size}"
    if "workload" in record:
        return str(record["workload"])
    name = record.get("framework") or f"ddp {record['model']}"
    batch = "" if "batch_size" in wanted else f", batch {record['batch_size']}"
    return f"{name}, {record['world_size']} ranks{batch}"


_STYLE = """text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1c2733 }
.ground { fill: #ffffff } .label { text-anchor: end } .small { font-size: 11.5px; fill: #55606b }
.s0 { fill: #aab4be } .s1, .only { fill: #3b88c8 } .spread { stroke: #1c2733; stroke-width: 1.5 }
.stock { stroke: #c9773f; stroke-width: 1.5; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) { .ground { fill: #161b22 }
text { fill: #e4e9ee } .small { fill: #a9b4bf }
.s0 { fill: #5a6570 } .spread { stroke: #e4e9ee } }"""
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 205, 440, 15, 12, 34


def svg(chart: Chart) -> str:
    """The chart as a drawing, light or dark as the reader prefers, whatever it is put on."""
    per_unit = _WIDTH / chart.widest
    names = ["only"] if len(chart.series) == 1 else [f"s{i}" for i in range(len(chart.series))]
    parts, x = [], float(_LEFT)
    for name, series in zip(names, chart.series, strict=True):
        parts.append(f'<rect class="{name}" x="{x:.0f}" y="6" width="12" height="12"/>')
        parts.append(f'<text class="small" x="{x + 18:.0f}" y="16">{html.escape(series)}</text>')
        x += 40 + 7 * len(series)
    y = _TOP
    for label, bars in chart.rows.items():
        middle = y + _BAR * len(bars) / 2 + 4.5
        parts.append(
            f'<text class="label" x="{_LEFT - 10}" y="{middle:.1f}">{html.escape(label)}</text>'
        )
        for name, (ratio, low, high) in zip(names, bars, strict=True):
            end, centre = _LEFT + ratio * per_unit, y + _BAR / 2
            spread = _LEFT + low * per_unit, _LEFT + high * per_unit
            parts += [
                f'<rect class="{name}" x="{_LEFT}" y="{y + 1}" width="{end - _LEFT:.1f}" '
                f'height="{_BAR - 2}"/>',
                f'<line class="spread" x1="{spread[0]:.1f}" y1="{centre}" x2="{spread[1]:.1f}" '
                f'y2="{centre}"/>',
                f'<text class="small" x="{max(end, spread[1]) + 6:.1f}" y="{centre + 4}">'
                f"{ratio:.2f}x</text>",
            ]
            y += _BAR
        y += _GAP
    stock, bottom = _LEFT + per_unit, y - _GAP + 6
    parts.append(
        f'<line class="stock" x1="{stock:.1f}" y1="{_TOP - 6}" x2="{stock:.1f}" y2="{bottom}"/>'
    )
    ground = f'<rect class="ground" width="720" height="{y}" rx="6"/>'
    body = "\n".join([ground, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {y}" role="img">\n'
        f"<style>\n{_STYLE}\n</style>\n{body}\n</svg>\n"
    )
