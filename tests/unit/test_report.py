"""The report's table and its plain values."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from deepytorch_core import report


def entry(**changes: Any) -> dict[str, Any]:
    values = {
        "group": "0",
        "op": "all_reduce",
        "algorithm": "one_shot",
        "reason": "small",
        "calls": 2,
        "bytes": 1_000_000,
        "time_us": 500.0,
    }
    return values | changes


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> report.Report:
    entries = [
        entry(op="broadcast", algorithm="delegate", reason="cuda tensors", calls=3),
        entry(),
        entry(calls=4, time_us=1000.0),  # another group that had the name before
    ]
    core = SimpleNamespace(statistics=lambda: entries)
    monkeypatch.setitem(sys.modules, "deepytorch_core._core", core)
    return report.report()


def test_rows_of_one_name_are_added_up(made: report.Report) -> None:
    assert made.rows[0] == report.Row(**entry(calls=6, bytes=2_000_000, time_us=1500.0))
    assert (made.native_calls, made.delegated_calls) == (6, 3)


def test_text(made: report.Report) -> None:
    assert str(made).splitlines() == [
        "deepytorch not active: 6 native and 3 delegated collectives (67% native)",
        "group  op          algorithm  calls  MB     ms/call  why",
        "0      all_reduce  one_shot   6      2.000  0.250    small",
        "0      broadcast   delegate   3      1.000  0.167    cuda tensors",
    ]


def test_plain_values(made: report.Report) -> None:
    plain = json.loads(json.dumps(made.to_dict()))
    assert plain["rows"][1]["reason"] == "cuda tensors"
    assert plain["options"]["collectives"] == "auto"
    assert plain["decisions"] == []
