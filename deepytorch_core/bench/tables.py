"""The README's results, generated from docs/results/*.jsonl.

`python -m deepytorch_core.bench.tables --check|--write README.md [--results docs/results]` compares
or replaces what stands between the two markers; --check ends with status 1 when it is stale.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepytorch_core.bench.job import format_size
from deepytorch_core.bench.record import COLLECTIVE_FIELDS, Record, read_records

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"

# Columns of the table, where measured: the README shows the shape, the records hold every size.
COLUMN_BYTES = tuple(size << 10 for size in (1, 16, 64, 1024, 4096, 16384, 65536))

_Row = tuple[str, str, int, bool]  # op, dtype, world_size, registered


def load(folder: str | Path) -> dict[str, list[Record]]:
    """The records of each *.jsonl file in `folder` by file name, sorted by name."""
    return {path.name: read_records(path) for path in sorted(Path(folder).glob("*.jsonl"))}


def render(files: Mapping[str, Sequence[Record]]) -> str:
    """Markdown for all records, a table for each file; "" without records.

    Raises ValueError for a record of another kind than `bench collectives` writes: a record that
    no table shows would look like a result that was left out.
    """
    parts = [_render_file(name, records) for name, records in files.items() if records]
    return "\n\n".join(parts)


def replace(text: str, table: str) -> str:
    """`text` with `table` between the markers; ValueError unless each of them is there once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text needs one {BEGIN} and, after it, one {END}")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    body = f"{table}\n" if table else ""
    return f"{head}{BEGIN}\n{body}{END}{tail}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m deepytorch_core.bench.tables")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", metavar="FILE", type=Path, help="fail when FILE is stale")
    action.add_argument("--write", metavar="FILE", type=Path, help="bring FILE up to date")
    parser.add_argument("--results", metavar="FOLDER", type=Path, default=Path("docs/results"))
    options = parser.parse_args(arguments)
    path: Path = options.write or options.check
    try:
        text = path.read_text(encoding="utf-8")
        fresh = replace(text, render(load(options.results)))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 1
    if options.write:
        path.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        command = f"python -m deepytorch_core.bench.tables --write {path}"
        sys.stderr.write(f"{path}: the results differ from {options.results}; run {command}\n")
        return 1
    return 0


def _render_file(name: str, records: Sequence[Record]) -> str:
    for number, record in enumerate(records, start=1):
        missing = [field for field in COLLECTIVE_FIELDS if field not in record]
        if missing:
            raise ValueError(f"{name}, record {number}: no table shows it: lacks {missing}")
    cells: dict[_Row, dict[int, Record]] = {}
    for record in records:  # a later run of the same case replaces an earlier one
        row = (record["op"], record["dtype"], record["world_size"], record["registered"])
        cells.setdefault(row, {})[record["bytes"]] = record
    sizes = {size for line in cells.values() for size in line}
    columns = [size for size in COLUMN_BYTES if size in sizes] or sorted(sizes)
    if 0 in sizes and 0 not in columns:
        columns.insert(0, 0)
    shown = [line for line in cells.values() if any(size in line for size in columns)]
    lines = [
        _caption(name, [record for line in shown for record in line.values()]),
        "",
        _line(["operation", "dtype", "ranks", *(_heading(size) for size in columns)]),
        _line(["---", "---", "---:", *("---:" for _ in columns)]),
    ]
    for (op, dtype, world_size, registered), line in cells.items():
        label = f"{op} (registered)" if registered else op
        values = [_cell(line.get(size)) for size in columns]
        lines.append(_line([label, dtype, str(world_size), *values]))
    return "\n".join(lines)


def _caption(name: str, records: Sequence[Record]) -> str:
    machines = _distinct(record["machine"]["name"] for record in records)
    baselines = _distinct(record["baseline"] for record in records)
    torches = _distinct(record["versions"]["torch"] for record in records)
    commits = _distinct(record["commit"] for record in records)
    wrong = sum(record["wrong"] for record in records)
    return (
        f"{machines}, torch {torches}, commit {commits}: times faster than {baselines}, in "
        f"brackets the quartiles over neighbouring blocks; {wrong} wrong elements "
        f"([{name}](docs/results/{name}))."
    )


def _distinct(values: Iterable[Any]) -> str:
    return " / ".join(dict.fromkeys(str(value) for value in values))


def _heading(num_bytes: int) -> str:
    return format_size(num_bytes) if num_bytes else "no data"


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    low, high = record["speedup_spread"]
    return f"**{_ratio(record['speedup'])}** ({_ratio(low)}-{_ratio(high)})"


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
