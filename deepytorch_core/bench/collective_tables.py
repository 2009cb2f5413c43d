"""Tables of operations: what `deepytorch bench collectives` and `bench nccl` recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import cells
from deepytorch_core.bench.cells import Files, Provenance, caption, line
from deepytorch_core.bench.job import format_size
from deepytorch_core.bench.record import describe_emulated

# Columns of the table, where measured: it shows the shape, the records hold every size.
COLUMN_BYTES = tuple(size << 10 for size in (1, 16, 64, 1024, 4096, 16384, 65536))

_ROW = ("dtype", "world_size", "baseline")


def collectives(files: Files) -> str:
    """On CPUs, or between emulated nodes: a column for each usual size."""
    rows = _rows(files)
    sizes = {size for row in rows.values() for size in row}
    columns = [size for size in COLUMN_BYTES if size in sizes]
    # A row shows something: where it has no usual size, its own ones.
    columns += {size for row in rows.values() for size in row if not row.keys() & {*columns}}
    columns.sort()
    return _table(files, rows, {"operation": "---", "dtype": "---", "ranks": "---:"}, columns)


def gpu(files: Files) -> str:
    """Every size has a column, every cell both times: claims differ from size to size."""
    rows = _rows(files, "cuda_graph")
    columns = sorted({size for row in rows.values() for size in row})
    text = _table(files, rows, {"operation": "---", "dtype": "---", "GPUs": "---:"}, columns)
    return (
        f"{text} Below it the microseconds of a call, ours : theirs, and the algorithm; eager "
        "calls also with the CPU's microseconds."
    )


_Row = tuple[Any, ...]  # label, dtype, ranks, baseline, file, on GPUs also whether in a CUDA graph


def _rows(files: Files, *more: str) -> dict[_Row, dict[int, Record]]:
    """The records of each row by size; a later run of the same case replaces an earlier one."""
    rows: dict[_Row, dict[int, Record]] = {}
    for name, records in files.items():
        for record in records:
            row = (_label(record), *(record[field] for field in _ROW), name)
            row += tuple(record[field] for field in more)
            rows.setdefault(row, {})[_column(record)] = record
    return rows


def _table(
    files: Files, rows: dict[_Row, dict[int, Record]], titles: dict[str, str], columns: list[int]
) -> str:
    shown = {
        name: [record for row, own in rows.items() if row[4] == name for record in own.values()]
        for name in files
    }
    origins = Provenance(record for records in shown.values() for record in records)
    has_timing = any(len(row) > 5 for row in rows)
    titles = {**titles, "against": "---", **({"timing": "---"} if has_timing else {})}
    titles |= {_heading(size): "---:" for size in columns} | origins.titles
    lines = cells.head(titles)
    for row, own in rows.items():
        label, dtype, world_size, baseline = row[:4]
        found = [label, dtype, str(world_size), baseline]
        found += ["CUDA graph" if row[5] else "eager"] if has_timing else []
        found += [_gpu_cell(own.get(size), full=has_timing) for size in columns]
        lines.append(line([*found, *origins.of(own.values())]))
    return "\n".join([*lines, "", caption(shown)])


def _gpu_cell(record: Record | None, *, full: bool) -> str:
    if record is None or not full:
        return cells.times(record)
    parts = [cells.times(record), f"{_us(record['time_us'])} : {_us(record['baseline_time_us'])}"]
    if record["cpu_us"] is not None:
        parts.append(f"CPU {_us(record['cpu_us'])} : {_us(record['baseline_cpu_us'])}")
    return "<br>".join([*parts, record["algorithm"]])


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _label(record: Record) -> str:
    marks = [
        *(["registered"] if record["registered"] else []),
        *(["direct call"] if record.get("direct") else []),
        *(["beside matrix products"] if record.get("compute_us") else []),
        *(["size per rank"] if _is_per_rank(record) else []),
        *([describe_emulated(record["emulated"])] if record.get("emulated") else []),
    ]
    return f"{record['op']} ({', '.join(marks)})" if marks else str(record["op"])


def _column(record: Record) -> int:
    return int(record["bytes_per_rank"] if _is_per_rank(record) else record["bytes"])


def _is_per_rank(record: Record) -> bool:
    """Asked for by one rank's part, where that is another number than nccl-tests' size."""
    return bool(record.get("per_rank")) and record["bytes_per_rank"] != record["bytes"]


def _heading(num_bytes: int) -> str:
    return format_size(num_bytes) if num_bytes else "no data"


def nccl(files: Files) -> str:
    """NCCL's own choice against its other algorithms and protocols."""
    latest = {name: _latest_choices(records) for name, records in files.items()}
    titles = {"operation": "---", "ranks": "---:", "size": "---:", "NCCL's own": "---:"}
    lines = cells.head({**titles, "the fastest other": "---", "chosen": "---"})
    for record in (record for records in latest.values() for record in records):
        lines += map(line, _choices(record))
    return "\n".join([*lines, "", caption(latest)])


def _latest_choices(records: Sequence[Record]) -> list[Record]:
    more = {"baseline": "NCCL's own choice", "wrong": 0}  # wrong results end the measurement
    latest = {
        (record["world_size"], str(record.get("emulated"))): {**record, **more}
        for record in records
    }
    return list(latest.values())


def _choices(record: Record) -> Iterable[list[str]]:
    place = f" ({describe_emulated(record['emulated'])})" if record.get("emulated") else ""
    chosen = {(choice["collective"], choice["first_bytes"]) for choice in record["choices"]}
    for case in dict.fromkeys((row["op"], row["bytes"]) for row in record["rows"]):
        rows = [row for row in record["rows"] if (row["op"], row["bytes"]) == case]
        best = max(rows, key=lambda row: float(row["speedup"]))
        own = min(float(row["baseline_time_us"]) for row in rows)
        ratio = cells.ratio([best["speedup"], *best["speedup_spread"]])
        yield [
            case[0] + place,
            str(record["world_size"]),
            format_size(case[1]),
            f"{own:,.0f} us",
            f"{best['algorithm']} {best['protocol']} {ratio}",
            "yes" if case in chosen else "no",
        ]
