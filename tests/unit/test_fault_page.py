"""docs/faults.md is made of records, says what was found, and is what the repository holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.base.provenance import read_records
from fault_matrix.__main__ import repeated
from fault_matrix.cases import cases
from fault_matrix.page import render
from fault_matrix.runner import Result

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
# Other machines' first: a case that one of them could not run says nothing against the others.
RECORDS = [*sorted((ROOT / "docs").glob("faults-*.jsonl")), ROOT / "docs" / "faults.jsonl"]


def record(fault: str, path: str, phase: str, **changes: Any) -> dict[str, Any]:
    return {
        "fault": fault,
        "path": path,
        "phase": phase,
        "outcome": "error",
        "took_s": [0.1, 0.26],
        "message": "rank 1\ndied",
        "wrong": [],
        "skipped": "",
        "machine": {"name": "2-core box"},
        "versions": {"torch": "2.13"},
        "commit": "abc",
        **changes,
    }


def test_cells_say_what_came_of_each_case() -> None:
    page = render(
        [
            record("SIGKILL", "shm", "init", wrong=["it hung"]),
            record("SIGKILL", "shm", "collective"),
            record("SIGKILL", "shm", "destroy", outcome="leaves", took_s=[0.04]),
            record("SIGSTOP 5 s", "shm", "between", outcome="recovers"),
            record("SIGKILL", "gpu", "init", skipped="needs 2 GPUs", outcome=""),
        ]
    )
    assert "| SIGKILL | **WRONG** | - | error 0.3 s | leaves 0.0 s |" in page
    assert "| SIGSTOP 5 s | - | recovers | - | - |" in page
    assert "SIGKILL | shm | init: it hung" in page
    assert "`rank 1 died`" in page
    assert "## gpu" not in page
    assert "4 cases, run on: 2-core box, torch 2.13" in page


def test_faults_in_frameworks_have_a_table() -> None:
    def found(planted: str, **changes: Any) -> dict[str, Any]:
        return {
            "bench": "framework faults",
            "framework": "DDP",
            "planted": planted,
            "named": True,
            "took_s": 0.24,
            "message": "rank 2 | died",
            "machine": {"name": "2-core box"},
            "versions": {"torch": "2.13"},
            **changes,
        }

    page = render(
        [
            record("SIGKILL", "shm", "init"),
            found("killed", named=False),
            found("killed"),
            found("slow", took_s=None, named=False, message="x" * 999),
        ]
    )
    assert "1 of 2 faults are named; 2-core box, torch 2.13." in page
    assert "| DDP | killed | yes | 0.2 s | `rank 2 \\| died` |" in page
    assert "| DDP | slow | **NO** | goes on | `xxx" in page
    assert max(map(len, page.splitlines())) < 400


def test_the_last_record_of_a_case_counts() -> None:
    page = render([record("SIGKILL", "shm", "init", wrong=["x"]), record("SIGKILL", "shm", "init")])
    assert "WRONG**:" in page  # the legend's
    assert "**WRONG** |" not in page


def test_what_stock_leaves_as_well_counts_against_no_case() -> None:
    stocks = ["left over: descriptors: pipe, socket (12)", "left over: threads: python (3)"]
    found = [
        record("no GPU memory", "cpu-reduce-4", "init", outcome="ends", wrong=stocks),
        record("no GPU memory", "cpu-reduce-4", "between", wrong=[*stocks, "it hung"]),
        record("no GPU memory", "cpu-reduce", "init", wrong=stocks[:1]),
    ]
    page = render(found)
    assert "| no GPU memory | ends 0.3 s | **WRONG** | - | - |" in page
    assert "| no GPU memory | **WRONG** | - | - | - |" in page
    assert "* no GPU memory | cpu-reduce-4 | between: it hung\n" in page
    assert "* no GPU memory, cpu-reduce-4: descriptors: pipe, socket (12), threads (3)" in page


def test_unknown_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="no such case: meteor"):
        render([record("meteor", "shm", "init")])
    with pytest.raises(ValueError, match="no records"):
        render([])


def test_the_page_is_that_of_the_records() -> None:
    assert PAGE.read_text() == render([each for file in RECORDS for each in read_records(file)]), (
        f"python -m fault_matrix --list; make test-faults writes {PAGE.name}"
    )


def test_repeated_runs_have_a_table_of_their_own() -> None:
    many = {"runs": 34, "as_promised": 34, "median_s": 0.069, "most_s": 0.333}
    records = [record("SIGKILL", "shm", "collective", **many)]
    assert "| SIGKILL | shm | in an all_reduce | 34 | 34 | 0.07 | 0.33 |" in render(
        [*records, record("SIGKILL", "shm", "collective")]
    )


def test_several_runs_of_a_case_are_summed_up_by_their_slowest_survivors() -> None:
    (case,) = cases(["SIGKILL | shm | collective"])
    told = repeated(
        [
            Result(case, "error", [0.1, 0.3]),
            Result(case, "error", [0.2, 0.1]),
            Result(case, "error", [0.1, 1.9], wrong=["took 1.9 s, the limit is 1 s"]),
            Result(case, "none", wrong=["it hung or crashed"]),
        ]
    )
    assert (told["runs"], told["as_promised"]) == (4, 2)
    assert (told["median_s"], told["most_s"]) == (0.3, 1.9)
