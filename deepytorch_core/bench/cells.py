"""Makes the pieces of the tables of results: lines, ratios, captions, provenance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepytorch_core.base.provenance import Record
from deepytorch_core.bench.record import claimed

Files = Mapping[str, Sequence[Record]]
"""Records by the link to their file."""


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(titles: Mapping[str, str]) -> list[str]:
    """The two lines above a table's rows: each column's title, and "---" or, right, "---:"."""
    return [line(titles), line(titles.values())]


def times(record: Record | None) -> str:
    """`speedup` with its quartiles: "**1.50** (1.40-1.60)"; "" without a record."""
    if record is None:
        return ""
    low, high = record["speedup_spread"]
    return claimed(record, f"**{short(record['speedup'])}** ({short(low)}-{short(high)})")


def ratio(values: Sequence[float] | None) -> str:
    """[median, lower quartile, upper quartile] as "1.50x (1.40-1.60)"; "" for None."""
    if values is None:
        return ""
    return f"{values[0]:.2f}x ({values[1]:.2f}-{values[2]:.2f})"


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def losses(record: Record) -> str:
    difference = record["loss_difference"]
    if difference is None:
        return "differ"
    return "equal" if difference == 0 else f"within {difference:.0e}"


def distinct(values: Iterable[Any]) -> str:
    return " / ".join(dict.fromkeys(str(value) for value in values))


def origin(record: Record, field: str) -> str:
    return str(record["machine"]["name"] if field == "machine" else record[field])


class Provenance:
    """The columns that tell rows of other machines and commits apart; none where all agree."""

    def __init__(self, records: Iterable[Record]) -> None:
        records = list(records)
        self.titles = {
            field: "---"
            for field in ("machine", "commit")
            if len({origin(record, field) for record in records}) > 1
        }

    def of(self, records: Iterable[Record]) -> list[str]:
        """The cells of a row that shows these records."""
        records = list(records)
        return [distinct(origin(record, field) for record in records) for field in self.titles]


def caption(files: Files, wrong: str = "wrong elements") -> str:
    """Return the caption of these records' table: what it compares, and where each file is from.

    `wrong` is what the records' field of that name counts.
    """
    records = [record for group in files.values() for record in group]
    baselines = distinct(record["baseline"] for record in records)
    num_wrong = sum(record["wrong"] + record.get("baseline_wrong", 0) for record in records)
    sources = "; ".join(_source(name, own) for name, own in files.items() if own)
    return (
        f"Times faster than {baselines}, in brackets the quartiles over neighbouring blocks; "
        f"{num_wrong} {wrong}. {sources}."
    )


def _source(name: str, records: Sequence[Record]) -> str:
    machines = distinct(origin(record, "machine") for record in records)
    torches = distinct(record["versions"]["torch"] for record in records)
    commits = distinct(record["commit"] for record in records)
    return f"{machines}, torch {torches}, commit {commits} ([{Path(name).name}]({name}))"
