"""The report's table and its plain values."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepytorch_core.base import decisions
from deepytorch_core.base.decisions import is_stock
from deepytorch_core.hang import record
from deepytorch_core.metering import counts
from deepytorch_core.report import summary


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


def plan() -> dict[str, Any]:
    def time(algorithm: str, chunk_bytes: int, median_us: float) -> dict[str, Any]:
        return {
            "algorithm": algorithm,
            "chunk_bytes": chunk_bytes,
            "channels": 0,
            "threads": 0,
            "delegated": 0,
            "median_us": median_us,
            "spread_us": (median_us - 1, median_us + 1),
        }

    return {
        "op": "all_reduce",
        "ranks": 2,
        "oversubscribed": False,
        "device": "",
        "first_bytes": 524288,
        "last_bytes": 2097151,
        "measured_bytes": 1048576,
        "algorithm": "pipelined",
        "chunk_bytes": 131072,
        "channels": 0,
        "threads": 0,
        "delegated": 0,
        "reason": "fastest measured",
        "source": "measured now",
        "candidates": [time("pipelined", 131072, 300.4), time("delegate", 0, 1500.0)],
    }


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> summary.Report:
    entries = [
        entry(op="broadcast", algorithm="delegate", reason="cuda tensors", calls=3),
        entry(),
        entry(calls=4, time_us=1000.0),  # another group that had the name before
    ]
    ranks = [
        {"rank": 0, "times_last": 1, "cost_us": 100.0},
        {"rank": 3, "times_last": 3, "cost_us": 1.5e6},
    ]
    arrivals = [
        {"group": "0", "operations": 4, "waited_us": 2e6, "ranks": ranks},
        {"group": "unused", "operations": 0, "waited_us": 0.0, "ranks": ranks},
    ]
    core = SimpleNamespace(
        statistics=lambda: entries,
        plans=lambda: [plan()],
        arrivals=lambda: arrivals,
        spent_on_tuning_s=lambda: 0.0,
        registered_memory=lambda: {"in_use_bytes": 0, "reserved_bytes": 4096},
        flight_record_fd=lambda: -1,
    )
    monkeypatch.setitem(sys.modules, "deepytorch_core._core", core)
    monkeypatch.setattr(summary.activation, "is_active", lambda: False)
    monkeypatch.setattr(summary.step_timer, "_course", summary.step_timer.Course())
    return summary.report()


def test_rows_of_one_name_are_added_up(made: summary.Report) -> None:
    assert made.rows[0] == summary.SummaryRow(**entry(calls=6, bytes=2_000_000, time_us=1500.0))
    assert (made.native_calls, made.delegated_calls) == (6, 3)


def test_a_forked_child_counts_only_its_own(
    made: summary.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give a child its parent's counts, with some more of an old row and a row of its own."""
    core = sys.modules["deepytorch_core._core"]
    monkeypatch.setattr(counts, "_at_fork", None)
    monkeypatch.setattr(counts, "_parents", None)
    monkeypatch.setattr(counts, "_group_sizes", {})
    before = copy.deepcopy(core.statistics())
    monkeypatch.setattr(core, "statistics", lambda: copy.deepcopy(before))
    monkeypatch.setattr(core, "spent_on_tuning_s", lambda: 2.0)
    counts.note_group("0", 2)
    assert summary.report().groups == {"0": 2}
    counts._note()
    counts._begin_anew()
    monkeypatch.setattr(core, "spent_on_tuning_s", lambda: 2.5)
    begun = summary.report()
    assert begun.groups == {}
    assert (begun.rows, begun.waiting) == ((), ())
    assert not any("what" not in decision for decision in begun.decisions)
    assert begun.course["all_tuning_s"] == 0.5
    after = [*before, entry(op="barrier", calls=1)]
    after[2] = entry(calls=9, bytes=6_000_000, time_us=4000.0)
    monkeypatch.setattr(core, "statistics", lambda: copy.deepcopy(after))
    assert summary.report().rows == (
        summary.SummaryRow(**entry(calls=5, bytes=5_000_000, time_us=3000.0)),
        summary.SummaryRow(**entry(op="barrier", calls=1)),
    )


def test_recent_times_are_each_operations_own(
    made: summary.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second and third are called while the first goes on, and wait for their turns."""
    ended = [
        record.Ended("0", "all_reduce", True, 100, 1_000, 9_000),
        record.Ended("0", "all_reduce", True, 100, 2_000, 13_000),
        record.Ended("0", "all_reduce", True, 7000, 3_000, 53_000),
        record.Ended("1", "all_reduce", True, 100, 3_000, 4_000),
        record.Ended("0", "all_gather", False, 100, 60_000, 61_500),
        record.Ended("0", "all_reduce", True, 100, 70_000, 72_000),
    ]
    monkeypatch.setattr(record, "ended", lambda descriptor: ended)
    names = ("group", "op", "native", "bytes", "calls", "median_us")
    assert [tuple(row[name] for name in names) for row in summary.report().recent] == [
        ("0", "all_gather", False, 100, 1, 1.5),
        ("0", "all_reduce", True, 100, 3, 4.0),
        ("0", "all_reduce", True, 7000, 1, 40.0),
        ("1", "all_reduce", True, 100, 1, 1.0),
    ]
    assert summary.report(recent=False).recent == ()


def test_what_is_no_record_of_this_process_has_no_times(tmp_path: Path) -> None:
    """Read other files: a forked child's parent's descriptor may be another one by now."""
    other = tmp_path / "file"
    for content in (b"", b"x" * 9000, b"dptfly01" + bytes(9000)):
        other.write_bytes(content)
        with other.open("rb") as file:
            assert record.ended(file.fileno()) == []
    assert record.ended(-1) == []


@pytest.mark.parametrize(
    ("told", "nodes"),
    [
        ({}, 1),
        ({"RANK": "0", "WORLD_SIZE": "8"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4"}, 2),
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "four"}, 1),
    ],
)
def test_nodes_are_those_that_the_launcher_told(
    told: dict[str, str], nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert summary.report().nodes == nodes


def test_text(made: summary.Report) -> None:
    assert str(made).splitlines() == [
        "deepytorch not active: 6 native and 3 delegated collectives (67% native)",
        "group  op          algorithm  calls  MB     ms/call  why",
        "0      all_reduce  one_shot   6      2.000  0.250    small",
        "0      broadcast   delegate   3      1.000  0.167    cuda tensors",
        "waiting: in 4 native operations of group 0 this rank waited 2.000 s for others; rank 3 "
        "held up the group longest, 1.500 s, and came last in 75% of them",
        "decision: all_reduce of 2 ranks, 524288 to 2097151 bytes: pipelined/128K, measured now "
        "(pipelined/128K 300 us, delegate 1500 us)",
    ]


def test_steps_are_said_once_there_are_two(made: summary.Report) -> None:
    timed = {"steps": 21, "timed_steps": 20, "seconds": 10.0, "exposed_s": 2.5, "data_s": 1.0}
    assert str(dataclasses.replace(made, course=timed)).splitlines()[5] == (
        "steps: 21, 500.0 ms each; of that 25.0% in collectives that nothing hid and 10.0% "
        "waiting for data"
    )


@pytest.mark.parametrize(
    ("share", "exposed_s", "data_s", "said"),
    [
        (0.93, 2.5, 1.0, "GPU: it worked 93% of the last minute"),
        (0.5, 0.1, 0.2, "GPU: it worked 50% of the last minute, and waited for what the host "),
        (0.5, 3.0, 1.0, "GPU: it worked 50% of the last minute, and waited for collectives most"),
        (0.2, 0.1, 7.0, "GPU: it worked 20% of the last minute, and waited for data most"),
    ],
)
def test_the_work_of_a_gpu_is_said_and_what_it_waits_for(
    share: float, exposed_s: float, data_s: float, said: str, made: summary.Report
) -> None:
    timed = {"steps": 21, "timed_steps": 20, "seconds": 10.0}
    course = timed | {"exposed_s": exposed_s, "data_s": data_s, "gpu_share": share}
    assert str(dataclasses.replace(made, course=course)).splitlines()[6].startswith(said)


def test_decisions_of_gpus_name_them_and_their_grids() -> None:
    kernel = {"algorithm": "low_latency", "channels": 8, "threads": 512, "median_us": 8.25}
    stock = {"algorithm": "delegate", "channels": 0, "threads": 0, "median_us": 16.0}
    whole = {"chunk_bytes": 0, "delegated": 0}
    times = [kernel | whole, stock | whole]
    decided = plan() | kernel | whole | {"candidates": times, "device": "NVIDIA H200"}
    assert summary._sentence(decided) == (
        "decision: all_reduce of 2 ranks on NVIDIA H200, 524288 to 2097151 bytes: "
        "low_latency/8x512, measured now (low_latency/8x512 8.2 us, delegate 16.0 us)"
    )


def test_decisions_name_the_delegates_part() -> None:
    divided = plan() | {"algorithm": "cpu_reduce", "channels": 3, "threads": 4, "delegated": 40}
    assert "cpu_reduce/3x4/128K/40% delegated" in summary._sentence(divided)


def test_choices_made_in_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decisions, "_made", [])
    decisions.record("DDP buckets", "4+4 MiB", "faster than 1+25 MiB", times_ms={"4+4 MiB": 2.5})
    decisions.record("FSDP2 buffers", "in registered memory", "not measured: tune=off")
    # A measured choice is said at once, the others only if somebody asks.
    line = "DDP buckets: 4+4 MiB, faster than 1+25 MiB (4+4 MiB 2.500 ms)"
    assert capsys.readouterr().err == f"deepytorch: {line}\n"
    made = summary.report()
    assert str(made).splitlines()[-2:] == [
        f"decision: {line}",
        "decision: FSDP2 buffers: in registered memory, not measured: tune=off",
    ]
    assert json.loads(json.dumps(made.to_dict()))["decisions"][-2]["times_ms"] == {"4+4 MiB": 2.5}


def test_plain_values(made: summary.Report) -> None:
    plain = json.loads(json.dumps(made.to_dict()))
    assert plain["rows"][1]["reason"] == "cuda tensors"
    assert plain["memory"]["registered_bytes"] == 4096
    assert plain["memory"]["host_peak_bytes"] >= plain["memory"]["host_bytes"] > 0
    assert {"steps", "seconds", "exposed_s", "buckets", "losses"} <= plain["course"].keys()
    assert plain["options"]["collectives"] == "auto"
    (decision,) = plain["decisions"]
    (waiting,) = plain["waiting"]
    assert (waiting["slowest"], waiting["times_last"]) == (3, 3)
    assert decision["chunk_bytes"] == 131072
    assert decision["candidates"][1]["median_us"] == 1500.0


@pytest.mark.parametrize("chosen", ["stock", "off", "eager", "launched", "padded", "fused"])
def test_what_is_left_as_it_was_is_stock(chosen: str) -> None:
    assert is_stock({"what": "a choice", "chosen": chosen}) == (chosen != "fused")


def test_a_plan_of_the_tuners_is_stocks_where_it_is_the_delegates() -> None:
    assert is_stock({"algorithm": "delegate"})
    assert not is_stock({"algorithm": "one_shot"})


def test_a_choice_that_is_made_again_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decisions, "_made", [])
    for ms in (1.0, 2.0):
        decisions.record("AdamW", "fused", "faster than stock", times_ms={"stock": ms})
    decisions.record("AdamW", "stock", "nothing is faster", times_ms={"stock": 1.0})
    assert len(decisions.made()) == 3
    assert capsys.readouterr().err.count("deepytorch: AdamW: ") == 2
