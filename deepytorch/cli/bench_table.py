"""The table of `deepytorch bench collectives`: nccl-tests' columns, the baseline, the speed-up."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from deepytorch.cli import console

if TYPE_CHECKING:
    from deepytorch_core.base.provenance import Record

# Title and width; a negative width aligns to the left.
_COLUMNS = {
    "op": ("op", -14),
    "size": ("size", 5),
    "count": ("count", 9),
    "type": ("type", -8),
    "redop": ("redop", -5),
    "root": ("root", 4),
    "algorithm": ("algorithm", -10),
    "time": ("time us", 9),
    "algbw": ("algbw GB/s", 10),
    "busbw": ("busbw GB/s", 10),
    "wrong": ("#wrong", 6),
    "baseline": ("", 9),
    "cpu": ("cpu us", 9),
    "baseline_cpu": ("its cpu us", 10),
    "speedup": ("speed-up (quartiles)", 22),
}


def shown(rows: Iterable["Record"], baseline: str) -> Iterator["Record"]:
    """The same rows, each printed as it comes, in lines that a pipe or a log keeps whole."""
    from deepytorch_core.bench.record import describe_emulated

    out = console.out()
    titles = {**_COLUMNS, "baseline": (f"{baseline} us", 9)}
    first = True
    for row in rows:
        if first:
            if row["cpu_us"] is None:
                titles = {name: title for name, title in titles.items() if "cpu" not in name}
            if row["emulated"]:
                out.print(describe_emulated(row["emulated"]), soft_wrap=True)
            out.print(
                _line(titles, [title for title, _ in titles.values()]), style="bold", soft_wrap=True
            )
            first = False
        cells = _cells(row)
        out.print(_line(titles, [cells[name] for name in titles]), soft_wrap=True)
        yield row


def _cells(row: "Record") -> dict[str, str]:
    from deepytorch_core.bench.job import format_size
    from deepytorch_core.bench.record import claimed

    low, high = row["speedup_spread"]
    return {
        "op": row["op"],
        "size": format_size(row["bytes"]),
        "count": str(count(row)),
        "type": row["dtype"],
        "redop": "sum" if row["op"] in ("all_reduce", "reduce_scatter") else "none",
        "root": "0" if row["op"] == "broadcast" else "-1",
        "algorithm": row["algorithm"],
        "time": f"{row['time_us']:.1f}",
        "algbw": f"{row['algbw_gbps']:.2f}",
        "busbw": f"{row['busbw_gbps']:.2f}",
        "wrong": str(row["wrong"]),
        "baseline": f"{row['baseline_time_us']:.1f}",
        "cpu": _microseconds(row["cpu_us"]),
        "baseline_cpu": _microseconds(row["baseline_cpu_us"]),
        "speedup": claimed(row, f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})"),
    }


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _line(columns: dict[str, tuple[str, int]], cells: list[str]) -> str:
    widths = [width for _, width in columns.values()]
    parts = [
        f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"
        for cell, width in zip(cells, widths, strict=True)
    ]
    return "  ".join(parts).rstrip()


def count(row: "Record") -> int:
    """nccl-tests' column `count`: elements of the buffer, or of one share where ranks share it."""
    import torch

    itemsize: int = getattr(torch, row["dtype"]).itemsize
    shares = row["world_size"] if row["op"] not in ("all_reduce", "broadcast") else 1
    return int(row["bytes"]) // itemsize // shares


def summary(rows: Sequence["Record"]) -> list[str]:
    """The worst and the median speed-up of each operation, over its right results."""
    from deepytorch_core.bench.job import format_size

    lines = []
    rows = [row for row in rows if not row["wrong"]]
    for op in dict.fromkeys(row["op"] for row in rows):
        own = [row for row in rows if row["op"] == op]
        worst = min(own, key=lambda row: float(row["speedup"]))
        median = statistics.median(float(row["speedup"]) for row in own)
        where = f"{format_size(worst['bytes'])} {worst['dtype']}" if worst["bytes"] else "no data"
        lines.append(
            f"{op}: worst {worst['speedup']:.2f}x ({where}), median {median:.2f}x of {len(own)}"
        )
    return lines


def handed_on(rows: Sequence["Record"]) -> list[str]:
    """Return the times of each row that the stock backend served as it was measured faster."""
    from deepytorch_core.bench.job import format_size

    lines = []
    for row in rows:
        stock = "nccl" if row["device"] == "cuda" else "gloo"
        plans = row["tuned"] if row["algorithm"] == "delegate" else ()
        for plan in (entry for entry in plans if entry["candidates"]):
            best: dict[str, float] = {}
            for candidate in plan["candidates"]:
                name = (
                    stock if candidate["algorithm"] == "delegate" else str(candidate["algorithm"])
                )
                name += f" with {candidate['delegated']}% {stock}" if candidate["delegated"] else ""
                best[name] = min(candidate["median_us"], best.get(name, candidate["median_us"]))
            times = ", ".join(f"{name} {time_us:.1f} us" for name, time_us in best.items())
            size = f"{format_size(row['bytes'])} {row['dtype']}"
            lines.append(f"{row['op']} {size} is handed on to {stock}, {plan['source']}: {times}")
    return lines
