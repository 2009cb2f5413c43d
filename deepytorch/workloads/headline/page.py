"""The headline table as Markdown, a picture or a page, from its records."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import tables
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.record import claimed, describe_rate

SUFFIXES = (".md", ".png", ".html")
_CASE = ("workload", "scale", "world_size")
_COLUMNS = ("workload", "ranks", "ours", "against plain", "against tuned", "claim", "losses")


def check(path: Path) -> None:
    """Raises BenchError for a name that says no format."""
    if path.suffix not in SUFFIXES:
        raise BenchError(f"--report {path}: end it in {', '.join(SUFFIXES)}")


def write(records: Sequence[Record], path: Path) -> None:
    """Write the table of `records`, the latest of each case, in the format that the name says."""
    check(path)
    latest = {
        (*(record[name] for name in _CASE), str(record["emulated"]), record.get("together")): record
        for record in records
    }
    shown = list(latest.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".md":
        path.write_text(tables.render({"records": shown}, folder=".") + "\n", encoding="utf-8")
    elif path.suffix == ".png":
        path.write_bytes(picture(shown))
    else:
        path.write_text(page(shown), encoding="utf-8")


def picture(records: Sequence[Record]) -> bytes:
    """PNG: a bar for each speed-up, with its quartiles, and a mark for what is claimed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.4 + 0.6 * len(records)), layout="constrained")
    axes: Any = figure.subplots()
    for row, record in enumerate(records):
        for key, colour, offset in (
            ("against_plain", "C0", -0.18),
            ("against_tuned", "C2", 0.18),
        ):
            if record[key] is None or record["wrong"]:
                continue
            ratio, low, high = record[key]
            errors = [[ratio - low], [high - ratio]]
            label = key.replace("_", " ") if row == 0 else None
            axes.barh(row + offset, ratio, 0.32, xerr=errors, color=colour, label=label)
        if record["claim"]:
            axes.plot([record["claim"]] * 2, [row - 0.4, row + 0.4], color="0.2", linewidth=2)
    axes.axvline(1.0, color="0.6", linewidth=1)
    axes.set_yticks(range(len(records)), [_name(record) for record in records])
    axes.invert_yaxis()
    axes.set_xlabel("times faster; black: claimed for the modelled product, against plain")
    if axes.patches:
        axes.legend(loc="lower right")
    written = io.BytesIO()
    figure.savefig(written, dpi=130, format="png")
    return written.getvalue()


def page(records: Sequence[Record]) -> str:
    """One HTML file, with the picture in it."""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(record)) + "</tr>\n"
        for record in records
    )
    machines = ", ".join(dict.fromkeys(str(record["machine"]["name"]) for record in records))
    image = base64.b64encode(picture(records)).decode()
    return (
        "<!doctype html>\n<meta charset='utf-8'>\n<title>deepytorch: headline workloads</title>\n"
        "<style>body{font-family:sans-serif;margin:2em}td,th{padding:.3em .8em;text-align:right}"
        "td:first-child,th:first-child{text-align:left}</style>\n"
        f"<h1>Headline workloads</h1>\n<p>{html.escape(machines)}</p>\n"
        f"<table>\n<tr>{head}</tr>\n{rows}</table>\n"
        f"<img alt='speed-ups' src='data:image/png;base64,{image}'>\n"
    )


def _name(record: Record) -> str:
    name = str(record["workload"])
    name += "" if record["scale"] == "full" else f" ({record['scale']})"
    name += " (both arms in each process)" if record.get("together") else ""
    return name + (" (emulated nodes)" if record["emulated"] else "")


def _cells(record: Record) -> list[str]:
    return [
        _name(record),
        str(record["world_size"]),
        describe_rate(record, "ours"),
        _ratio(record, "against_plain"),
        _ratio(record, "against_tuned"),
        f"{record['claim']:.2f}x" if record["claim"] else "",
        "DIFFER" if record["wrong"] else f"within {record['loss_difference']:.1%}",
    ]


def _ratio(record: Record, key: str) -> str:
    ratio = record[key]
    if ratio is None:
        return ""
    return claimed(record, f"{ratio[0]:.2f}x ({ratio[1]:.2f}-{ratio[2]:.2f})")
