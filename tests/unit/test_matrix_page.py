"""The page of tested versions can be brought up to date one cell at a time, and loses no row."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
matrix = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci/matrix_page.py")))
OLD = """\
# Something

| Python | torch | adapter | outcome | commit |
|---|---|---|---|---|
| 3.11.7 | 2.11.0+cu130 | prebuilt | ok: 22 calls | aaaa |
| 3.12.1 | 2.9.1+cpu | compiled | FAILED | aaaa |
| 3.12.1 | 2.11.0+cpu | prebuilt | ok: 22 calls | aaaa |

The latest run: long ago.

* not tried: no python3.13 here
* no GPU on this machine
"""


def rows(page: Path) -> list[str]:
    return [line for line in page.read_text().splitlines() if line.startswith("| 3")]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "matrix.md"
    path.write_text(OLD)
    return path


def test_a_cell_takes_its_own_place(page: Path) -> None:
    """Also with another patch release of Python and another build of torch: it is that cell."""
    cells = "cell: 3.12.3 | 2.11.0+cu130 | prebuilt | ok: 23 calls | bbbb\n"
    matrix.write(page, cells, ["not tried: no wheel for python3.14"], "The latest run: now.")
    assert rows(page) == [
        "| 3.11.7 | 2.11.0+cu130 | prebuilt | ok: 22 calls | aaaa |",
        "| 3.12.1 | 2.9.1+cpu | compiled | FAILED | aaaa |",
        "| 3.12.3 | 2.11.0+cu130 | prebuilt | ok: 23 calls | bbbb |",
    ]
    text = page.read_text()
    assert "long ago" not in text
    assert text.endswith(
        "\nThe latest run: now.\n\n* no GPU on this machine\n* not tried: no wheel for python3.14\n"
    )


def test_a_red_cell_takes_the_place_of_a_green_one(page: Path) -> None:
    matrix.write(page, "cell: 3.11.7 | 2.11.0 | prebuilt | FAILED | bbbb\n", [], "now")
    assert rows(page)[0] == "| 3.11.7 | 2.11.0 | prebuilt | FAILED | bbbb |"
    assert len(rows(page)) == 3


def test_a_new_cell_is_sorted_by_version(page: Path) -> None:
    matrix.write(page, "cell: 3.9.0 | 2.11.0 | compiled | ok | bbbb\n", [], "now")
    assert [row.split()[1] for row in rows(page)] == ["3.9.0", "3.11.7", "3.12.1", "3.12.1"]
    assert [row.split()[3] for row in rows(page)][2:] == ["2.9.1+cpu", "2.11.0+cpu"]


def test_nothing_tried_changes_no_row(page: Path) -> None:
    before = rows(page)
    matrix.write(page, "", [], "now")
    matrix.write(page, "", [], "now")
    assert rows(page) == before


def test_the_first_page(tmp_path: Path) -> None:
    path = tmp_path / "new.md"
    matrix.write(path, "cell: 3.11.7 | 2.11.0 | compiled | ok | bbbb\n", [], "now")
    assert path.read_text() == f"{matrix.HEAD}| 3.11.7 | 2.11.0 | compiled | ok | bbbb |\n\nnow\n"


@pytest.mark.parametrize("cell", ["cell: 3.11.7 | 2.11.0 | ok | bbbb", "cell: ? | ? | a | b | c"])
def test_a_broken_cell_leaves_the_page_alone(page: Path, cell: str) -> None:
    with pytest.raises(ValueError, match=r"columns|invalid literal"):
        matrix.write(page, f"{cell}\n", [], "now")
    assert page.read_text() == OLD


def test_the_published_page_keeps_its_rows(tmp_path: Path) -> None:
    page = tmp_path / "matrix.md"
    shutil.copy(ROOT / "docs/results/matrix.md", page)
    before = rows(page)
    assert before
    matrix.write(page, "", [], "now")
    assert rows(page) == before


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script with a wheel, one Python, and environments that work with torch 2.11 alone."""
    folder = tmp_path / "checkout"
    tag = "cp{}{}".format(*sys.version_info)
    files = {
        "dist/COMMIT": "bbbb\n",
        ".ci/find-python": f"#!/bin/sh\n[ $1 = python3.11 ] && echo {sys.executable}\n",
        ".ci/fresh": """#!/bin/sh
[ $BARE = 1 ] && [ $2 = 2.11.0 ] || exit 1
echo "cell: 3.11.9 | $2+cpu | $7 | ok: 22 calls"
""",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name in ("matrix", "matrix_page.py"):
        shutil.copy(ROOT / ".ci" / name, folder / ".ci")
    with zipfile.ZipFile(folder / f"dist/deepytorch_train-0-{tag}-{tag}-linux.whl", "w") as wheel:
        for torch in ("2.11.0", "2.12.1"):
            wheel.writestr(f"deepytorch_core/_prebuilt/torch{torch}-abcd/deepytorch_c10d.so", "")
    return folder


@pytest.mark.parametrize(("torch", "outcome"), [("2.11.0", "ok: 22 calls"), ("2.12.1", "FAILED")])
def test_a_run_records_what_it_tried(page: Path, checkout: Path, torch: str, outcome: str) -> None:
    done = subprocess.run(
        [checkout / ".ci/matrix", torch],
        env={"PATH": "/usr/bin:/bin", "PAGE": str(page), "PYTHONS": "python3.11 python3.12"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == outcome.startswith("ok"), done.stdout + done.stderr
    mine = [row for row in rows(page) if row.endswith("| bbbb |")]
    assert len(mine) == 1
    assert mine[0].startswith("| 3.11.9 | 2.11.0+cpu" if done.returncode == 0 else "| 3.")
    assert f"| prebuilt | {outcome} |" in mine[0]
    assert "* not tried: no python3.12 here" in page.read_text()
