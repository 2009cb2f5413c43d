"""Tests that fuzzing keeps each target's executions and crashes; the page has their sum."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import fuzz_targets
from deepytorch_core.base.provenance import read_records
from fault_matrix.cases import Case
from fault_matrix.page import render
from fault_matrix.runner import Result
from fuzz_targets import Outcome, read_log

DONE = """\
INFO: Running with entropic power schedule (0xFF, 100).
#2\tINITED cov: 12 ft: 13 corp: 1/1b exec/s: 0 rss: 30Mb
Done {number} runs in 3 second(s)
stat::number_of_executed_units: {number}
stat::average_exec_per_sec:     41
"""
CRASHED = """\
==7== ERROR: libFuzzer: deadly signal
artifact_prefix='build/fuzz/json-'; Test unit written to build/fuzz/json-crash-86f7e437
stat::number_of_executed_units: {number}
"""


def test_a_log_tells_executions_and_crashes() -> None:
    number = random.randrange(1, 1 << 40)
    log = DONE.format(number=number)
    assert read_log("json", log, 0, 3.5) == Outcome("json", number, 0, 3.5)
    log = CRASHED.format(number=number)
    assert read_log("json", log, 77, 3.5) == Outcome("json", number, 1, 3.5)


def test_a_bad_end_without_an_input_counts_too() -> None:
    outcome = read_log("json", DONE.format(number=9), 23, 1.0)
    assert outcome is not None
    assert outcome.crashes == 1


def test_a_log_without_its_figure_is_no_result() -> None:
    assert read_log("json", "no such file", 1, 0.1) is None
    with pytest.raises(ValueError, match="fuzz_json ended well but says not how many"):
        read_log("json", "", 0, 0.1)


@pytest.mark.parametrize("breaks", [False, True])
def test_each_target_is_recorded_until_one_breaks(
    breaks: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    numbers = {"json": 1_000_123, "framing": 2_000_456, "control": 3}

    def run(target: str, seconds: int) -> tuple[str, int, float]:
        assert seconds == 7
        broken = breaks and target == "framing"
        log = (CRASHED if broken else DONE).format(number=numbers[target])
        return log, 77 if broken else 0, 7.2

    monkeypatch.setattr(fuzz_targets, "_run", run)
    monkeypatch.setattr(fuzz_targets, "_clang_version", lambda: "14.0")
    file = tmp_path / "fuzz.jsonl"
    assert fuzz_targets.main([*numbers, "--seconds", "7", "--json", str(file)]) == int(breaks)
    records = read_records(file)
    ran = list(numbers)[:2] if breaks else list(numbers)
    assert [(each["target"], each["executions"]) for each in records] == [
        (name, numbers[name]) for name in ran
    ]
    assert [each["crashes"] for each in records] == ([0, 1] if breaks else [0, 0, 0])
    assert all(each["versions"]["clang"] == "14.0" and each["commit"] for each in records)
    assert ("deadly signal" in capsys.readouterr().out) == breaks


def test_the_page_has_the_sum_of_all_runs() -> None:
    ran = {"machine": {"name": "2-core box"}, "versions": {"torch": "2.13"}}
    case = Result(Case("SIGKILL", "shm", "init"), "error", [0.1], "gone").to_dict() | ran
    run = {"bench": "fuzz", "crashes": 0} | ran
    records = [
        run | {"target": "json", "executions": 1_000_000, "seconds": 86.2},
        run | {"target": "python", "executions": 500, "seconds": 700.0},
        run | {"target": "json", "executions": 2_000_000, "seconds": 600.0, "crashes": 1},
    ]
    text = render([case, *records])
    assert (
        "* `make fuzz`: 3,000,500 executions (json 3,000,000, python 500), 686 s or more for each "
        "target, 1 crashes; 2-core box." in text
    )
    assert "make fuzz" not in render([case])
