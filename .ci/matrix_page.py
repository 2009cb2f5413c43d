"""The page of `make test-matrix`: `python .ci/matrix_page.py CELLS [NOTE ...]`, on standard output.

CELLS holds a line `cell: PYTHON | TORCH | ADAPTER | OUTCOME` for each environment tried.
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
its wheel, and our wheel. In it two ranks run collectives, compared with gloo, and a DDP step; then
`doctor`, `topology`, `report` and `explain` run, and `pip uninstall` leaves no file. *prebuilt*:
the adapter comes with the wheel, and neither a compiler nor CUDA is on `PATH`; *compiled*: at the
first use.
"""


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(cells: Path, notes: list[str]) -> None:
    print(HEAD)
    print("| Python | torch | adapter | outcome | commit |\n|---|---|---|---|---|")
    for line in sorted(cells.read_text().splitlines()):
        print(f"| {line.removeprefix('cell: ')} |")
    libc = " ".join(platform.libc_ver())
    compiler = output("c++", "--version").partition("\n")[0]
    print(f"\n{datetime.date.today().isoformat()}, {platform.system()}, {os.cpu_count()} cores of")
    print(f"{cpu()}, {libc}, {compiler}.")
    if notes:
        print("\n" + "\n".join(f"* {note}" for note in notes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
