"""Bars of measured ratios: records of docs/results as a drawing that goes into a page."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from deepytorch_core.bench import tables
from deepytorch_core.bench.job import format_size

ROOT = Path(__file__).resolve().parents[2]
WIDTH, LABEL, BAR, GAP = 720, 225, 18, 8


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
    largest = max(1.0, *(record["speedup_spread"][1] for record in records.values()))
    scale = (WIDTH - LABEL - 60) / largest
    height = len(records) * (BAR + GAP) + 22
    stock = LABEL + scale
    any_record = next(iter(records.values()))
    title = f"{file}, {settings}: times faster than {any_record['baseline']}"
    parts = [
        f'<figure class="drawing chart"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(title)}">'
    ]
    for number, (label, record) in enumerate(records.items()):
        top = number * (BAR + GAP)
        ratio, (low, high) = record["speedup"], record["speedup_spread"]
        middle = top + BAR / 2
        parts += [
            f'<text class="label" x="{LABEL - 8}" y="{middle + 4}">{html.escape(label)}</text>',
            f'<rect class="bar" x="{LABEL}" y="{top}" width="{ratio * scale:.1f}" height="{BAR}"/>',
            f'<line class="spread" x1="{LABEL + low * scale:.1f}" x2="{LABEL + high * scale:.1f}" '
            f'y1="{middle}" y2="{middle}"/>',
            f'<text class="value" x="{LABEL + high * scale + 6:.1f}" y="{middle + 4}">'
            f"{ratio:.2f}×</text>",
        ]
    parts += [
        f'<line class="stock" x1="{stock:.1f}" x2="{stock:.1f}" y1="0" y2="{height - 18}"/>',
        f'<text class="stock" x="{stock:.1f}" y="{height - 4}">{any_record["baseline"]} = 1</text>',
        "</svg></figure>",
    ]
    machine, versions = any_record["machine"]["name"], any_record["versions"]["torch"]
    parts.append(
        f"<p class='caption'>Times faster than {any_record['baseline']}; the thin line spans the "
        f"quartiles. {html.escape(machine)}, torch {html.escape(versions)}, commit "
        f"{any_record['commit']}.</p>"
    )
    return "\n".join(parts)
