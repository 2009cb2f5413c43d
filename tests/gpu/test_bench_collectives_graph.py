"""`bench collectives` on GPUs: replays of graphs, the CPU's time of eager calls, every baseline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.base.provenance import read_records
from deepytorch_core.bench.record import COLLECTIVE_FIELDS
from deepytorch_core.testing import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(2)]

MOVES = "all_reduce,all_gather,reduce_scatter,all_to_all"


def _bench(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    path = folder / "records.jsonl"
    command = [sys.executable, "-m", "deepytorch.cli", "bench", "collectives", "--json", str(path)]
    command += ["--device", "cuda", "--world-size", "2", "--dtype", "bfloat16", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_records(path)
    for record in records:
        assert set(record) == {*COLLECTIVE_FIELDS, "command"}
        assert record["wrong"] == record["baseline_wrong"] == 0
        assert record["time_us"] > 0
        assert record["baseline_time_us"] > 0
        assert record["num_blocks"] >= 8
        assert record["algorithm"] != "unknown"
    return records


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("baseline", "ops"),
    [("nccl", MOVES), ("nccl-symm", MOVES), ("torch-symm", "all_reduce,reduce_scatter")],
)
def test_replays_are_right_and_timed(tmp_path: Path, baseline: str, ops: str) -> None:
    records = _bench(
        tmp_path, "--cuda-graph", "--ops", ops, "--sizes", "1K,1000K", "--baseline", baseline
    )
    assert len(records) == 2 * len(ops.split(","))
    for record in records:
        assert record["cuda_graph"] is True
        assert record["calls_per_graph"] >= 2
        assert record["cpu_us"] is record["baseline_cpu_us"] is None
        assert bool(record["baseline_algorithm"]) == (baseline == "torch-symm")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("timing", [["--cuda-graph"], []], ids=["replays", "eager"])
def test_calls_beside_products_take_at_least_as_long_as_those(
    tmp_path: Path, timing: list[str]
) -> None:
    records = _bench(tmp_path, "--beside-compute", *timing, "--ops", MOVES, "--sizes", "1K,16M")
    assert len(records) == 2 * len(MOVES.split(","))
    for record in records:
        assert record["cpu_us"] is None
        assert record["compute_us"] > 0
        # A timing, but of what holds the products: shorter by half would be without them.
        assert record["time_us"] > record["compute_us"] / 2


@pytest.mark.timeout(300)
def test_eager_calls_say_what_they_cost_the_cpu(tmp_path: Path) -> None:
    (record,) = _bench(tmp_path, "--sizes", "4K")
    assert record["cuda_graph"] is False
    assert record["calls_per_graph"] is None
    assert record["cpu_us"] > 0
    assert record["baseline_cpu_us"] > 0


@pytest.mark.timeout(300)
def test_what_does_not_fit_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deepytorch.cli", "bench", "collectives", "--device", "cuda"]
    command += ["--ops", "all_to_all", "--sizes", "1K,4096G", "--json", str(tmp_path / "r.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    error = " ".join(done.stderr.split())
    assert "all_to_all of 4096G" in error
    assert "give smaller --sizes" in error
    assert not (tmp_path / "r.jsonl").exists()
