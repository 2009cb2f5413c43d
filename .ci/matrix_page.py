"""The page of `make test-matrix`: `python .ci/matrix_page.py PAGE CELLS [NOTE ...]`.

CELLS holds a line `cell: PYTHON | TORCH | ADAPTER | OUTCOME | COMMIT` for each environment that was
tried now. Each takes the place of the row that PAGE has of the same Python and torch. The other
rows stay as they are, with the commits that they were made at, so a cell can be brought up to date
alone. Lines of PAGE that begin with `* ` stay too, except what an earlier run had to leave out.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

# ruff: noqa: T201
HEAD = """\
# Tested versions

Written by `make test-matrix MATRIX_PAGE=...`. Each row is a fresh environment with that torch, from
its wheel, and our wheel, which was made at the commit in the last column. In it two ranks run
collectives, compared with gloo, and a DDP step; then `doctor`, `topology`, `report` and `explain`
run, and `pip uninstall` leaves no file. *prebuilt*: the adapter comes with the wheel, and neither a
compiler nor CUDA is on `PATH`; *compiled*: at the first use.

| Python | torch | adapter | outcome | commit |
|---|---|---|---|---|
"""
COLUMNS = 5
LEFT_OUT = "not tried"

Row = tuple[str, ...]
Key = tuple[tuple[int, ...], tuple[int, ...]]


def parse(line: str, prefix: str) -> Row:
    """The columns of a row, `prefix` and closing bar aside; raises ValueError if some lack."""
    row = tuple(part.strip() for part in line.removeprefix(prefix).rstrip(" |").split(" | "))
    if len(row) != COLUMNS:
        raise ValueError(f"not {COLUMNS} columns: {line}")
    return row


def key(row: Row) -> Key:
    """Return Python's minor release and torch's: rows that share both are the same cell."""
    python, torch = (
        tuple(int(part) for part in text.partition("+")[0].split(".")) for text in row[:2]
    )
    return python[:2], torch


def merge(page: str, cells: str) -> list[Row]:
    """The rows of `page` with those of `cells` in their places, by Python and torch."""
    rows = [
        parse(line, "| ")
        for line in page.splitlines()
        if line.startswith("| ") and line[2:3].isdigit()
    ]
    rows += [parse(line, "cell: ") for line in cells.splitlines()]
    return [row for _, row in sorted({key(row): row for row in rows}.items())]


def notes(page: str, new: list[str]) -> list[str]:
    """Return the notes below the table: those that people wrote there, then those of this run."""
    kept = [line[2:] for line in page.splitlines() if line.startswith("* ")]
    return [note for note in kept if not note.startswith(LEFT_OUT)] + new


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine() -> str:
    """Describe the machine that the latest cells ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    libc = " ".join(platform.libc_ver())
    compiler = output("c++", "--version").partition("\n")[0]
    return (
        f"The latest run: {datetime.date.today().isoformat()}, {platform.system()}, "
        f"{os.cpu_count()} cores of\n{names[0] if names else platform.machine()}, "
        f"{libc}, {compiler or 'no compiler'}."
    )


def write(path: Path, cells: str, new: list[str], made_on: str) -> None:
    """Bring the page at `path` up to date or begin it; ValueError for a broken row."""
    page = path.read_text() if path.exists() else ""
    rows = "".join(f"| {' | '.join(row)} |\n" for row in merge(page, cells))
    below = "".join(f"* {note}\n" for note in notes(page, new))
    path.write_text(f"{HEAD}{rows}\n{made_on}\n" + (f"\n{below}" if below else ""))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]).read_text(), sys.argv[3:], machine())
