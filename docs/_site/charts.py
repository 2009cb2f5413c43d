"""Bars of measured ratios: records of docs/results as a drawing that goes into a page."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from deepytorch_core.bench import tables
from deepytorch_core.bench.job import format_size

ROOT = Path(__file__).resolve().parents[2]


def draw(file: str, settings: str) -> str:
    """A bar for each record of `file` whose fields are as `settings` say, such as `op=all_reduce`.

    Settings are `name=value`, separated by blanks. A later record of the same case replaces an
    earlier one. Raises KeyError for a file that is not there, ValueError when no record fits.
    """
    wanted = dict(setting.split("=", 1) for setting in settings.split())
    fitting: dict[str, dict[str, Any]] = {}
    for record in tables.load(ROOT / "docs/results")[file]:
        if all(str(record.get(name)).lower() == value.lower() for name, value in wanted.items()):
            fitting[_label(record, wanted)] = dict(record)
    if not fitting:
        raise ValueError(f"no record of {file} has {settings}")
    return _picture(file, settings, fitting)


def _label(record: dict[str, Any], wanted: dict[str, str]) -> str:
    """What tells the record from its neighbours: not what all have in common."""
    if "op" in record:
        size = format_size(record["bytes"])
        return size if "op" in wanted else f"{record['op']}, {size}"
    name = record.get("framework") or f"ddp {record['model']}"
    batch = "" if "batch_size" in wanted else f", batch {record['batch_size']}"
    return f"{name}, {record['world_size']} ranks{batch}"


def _picture(file: str, settings: str, records: dict[str, dict[str, Any]]) -> str:
    """Rows of boxes whose widths are shares of the widest, so that they fit any screen."""
    widest = max(1.0, *(record["speedup_spread"][1] for record in records.values()))
    first = next(iter(records.values()))
    baseline = html.escape(first["baseline"])
    title = html.escape(f"{file}, {settings}: times faster than {first['baseline']}")
    parts = [f'<div class="chart" role="img" aria-label="{title}">']
    for label, record in records.items():
        ratio, low, high = (
            100 * value / widest for value in (record["speedup"], *record["speedup_spread"])
        )
        parts.append(
            f'<div class="row"><span class="label">{html.escape(label)}</span>'
            f'<span class="track"><i class="bar" style="width:{ratio:.1f}%"></i>'
            f'<i class="spread" style="left:{low:.1f}%;width:{high - low:.1f}%"></i>'
            f'<i class="stock" style="left:{100 / widest:.1f}%"></i></span>'
            f'<span class="value">{record["speedup"]:.2f}×</span></div>'
        )
    machine = html.escape(f"{first['machine']['name']}, torch {first['versions']['torch']}")
    parts += [
        "</div>",
        f'<p class="caption">Times faster than {baseline}, which is the dashed line; the thin line '
        f"spans the quartiles. {machine}, commit {html.escape(first['commit'])}.</p>",
    ]
    return "\n".join(parts)
