"""Rows of `bench collectives`: what the tuner went by is in the record, and said where it lost."""

import pytest

from deepytorch.cli import bench_table
from deepytorch_core.bench import timing
from deepytorch_core.bench.job import CollectivesJob
from deepytorch_core.bench.rows import RowMeasurement, cases, row_of
from deepytorch_core.metering import counts


def candidate(algorithm, median_us, **changes):
    fields = {"chunk_bytes": 0, "channels": 0, "threads": 0, "delegated": 0}
    return {
        **fields,
        "algorithm": algorithm,
        "median_us": median_us,
        "spread_us": (1, 2),
        **changes,
    }


def plan(**changes):
    fields = {
        **{"op": "all_gather", "ranks": 2, "oversubscribed": False, "device": "NVIDIA H200"},
        **{"first_bytes": 4096, "last_bytes": 8191, "measured_bytes": 4096, "delegated": 0},
        **{"algorithm": "delegate", "source": "measured now", "reason": "NCCL is faster"},
        "candidates": [
            candidate("push", 42.04, channels=16),
            candidate("push", 40.0, channels=32),
            candidate("push", 41.0, delegated=25),
            candidate("delegate", 33.3),
        ],
    }
    return {**fields, **changes}


def record(algorithm="delegate", **changes):
    fields = {"ops": ("all_gather",), "sizes": (8192,), "dtypes": ("float32",), "world_size": 2}
    job = CollectivesJob(**{**fields, "device": "cuda", "baseline": "nccl", **changes})
    (row,) = cases(job)
    comparison = timing.compare([[[10.0]], [[20.0]]])
    return row_of(job, row, RowMeasurement(comparison, (0, 0), (algorithm, "")))


@pytest.mark.parametrize(
    "other",
    [
        {"op": "all_reduce"},
        {"ranks": 4},
        {"device": ""},
        {"last_bytes": 4095},
        {"first_bytes": 4097},
    ],
)
def test_a_record_has_what_was_measured_for_it_and_no_other(monkeypatch, other):
    monkeypatch.setattr(counts, "plans", lambda: [plan(), plan(**other)])
    (tuned,) = record()["tuned"]
    assert tuned["algorithm"] == "delegate"
    assert tuned["measured_bytes"] == 4096
    assert [tried["median_us"] for tried in tuned["candidates"]] == [42.04, 40.0, 41.0, 33.3]
    assert tuned["candidates"][1]["channels"] == 32


def test_what_the_stock_backend_got_is_said_with_the_times(monkeypatch):
    monkeypatch.setattr(counts, "plans", lambda: [plan()])
    assert bench_table.handed_on([record()]) == [
        "all_gather 8K float32 is handed on to nccl, measured now: push 40.0 us, "
        "push with 25% nccl 41.0 us, nccl 33.3 us"
    ]
    assert bench_table.handed_on([record("push")]) == []
    for left in ([], [plan(candidates=[])]):
        monkeypatch.setattr(counts, "plans", lambda left=left: left)
        assert bench_table.handed_on([record()]) == []


def test_on_cpus_the_stock_backend_is_gloo(monkeypatch):
    monkeypatch.setattr(counts, "plans", lambda: [plan(device="")])
    (line,) = bench_table.handed_on([record(device="cpu", baseline="gloo")])
    assert line.endswith(": push 40.0 us, push with 25% gloo 41.0 us, gloo 33.3 us")
