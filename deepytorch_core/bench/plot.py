"""A picture of a benchmark run: time and speed-up over the size, one line per operation."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deepytorch_core.base.provenance import Record
from deepytorch_core.bench.job import format_size
from deepytorch_core.bench.record import describe_emulated


def series(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records of one line each, by label, ordered by size; operations without a size are left out.

    A later record of the same size replaces an earlier one.
    """
    lines: dict[str, dict[int, Record]] = {}
    for record in records:
        if record["bytes"]:
            label = f"{record['op']} {record['dtype']}, {record['world_size']} ranks"
            label += ", registered" if record["registered"] else ""
            lines.setdefault(label, {})[record["bytes"]] = record
    return {label: [line[size] for size in sorted(line)] for label, line in lines.items()}


def plot(records: Sequence[Record], path: str | Path) -> None:
    """Writes the picture to `path`; its ending chooses the format (png, svg, pdf).

    Raises ValueError when no record has a size, ModuleNotFoundError without matplotlib.
    """
    lines = series(records)
    if not lines:
        raise ValueError("nothing to plot: no operation with a size was measured")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        hint = "--plot needs matplotlib: pip install 'deepytorch-train[recipes]'"
        raise ModuleNotFoundError(hint, name=error.name) from error

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, speedups = figure.subplots(1, 2)
    for index, (label, line) in enumerate(lines.items()):
        color = f"C{index % 10}"
        sizes = [record["bytes"] for record in line]
        baseline = line[0]["baseline"]
        times.plot(sizes, _column(line, "time_us"), "o-", color=color, label=label)
        baseline_times = _column(line, "baseline_time_us")
        times.plot(sizes, baseline_times, "x--", color=color, label=f"{label}: {baseline}")
        speedups.plot(sizes, _column(line, "speedup"), "o-", color=color, label=label)
        low, high = zip(*_column(line, "speedup_spread"), strict=True)
        speedups.fill_between(sizes, low, high, color=color, alpha=0.2)
    speedups.axhline(1.0, color="black", linewidth=0.8)
    ticks = sorted({record["bytes"] for line in lines.values() for record in line})
    for axes, title in ((times, "time [us]"), (speedups, "speed-up (band: quartiles)")):
        axes.set(xscale="log", yscale="log", xlabel="bytes", title=title)
        axes.set_xticks(ticks, [format_size(size) for size in ticks], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    title = str(records[0]["machine"]["name"])
    emulated = records[0].get("emulated")
    figure.suptitle(f"{title}: {describe_emulated(emulated)}" if emulated else title)
    figure.savefig(path)


def _column(line: list[Record], field: str) -> list[Any]:
    return [record[field] for record in line]
