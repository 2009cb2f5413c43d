"""`bench train` with real ranks and a tiny model."""

from pathlib import Path

import pytest

from deepytorch.workloads import TrainJob, rounds
from deepytorch_core.bench.record import TRAIN_FIELDS

pytestmark = pytest.mark.usefixtures("forked_ranks")

TINY = {"parameters": 4096, "batch_size": 2, "steps": 5}


@pytest.mark.parametrize("num_rounds", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_both_arms_train_the_same(num_rounds, tmp_path):
    job = TrainJob(**TINY | {"steps": 10}, framework="fsdp2", world_size=2, trace=str(tmp_path))
    record = rounds.compare(job, rounds=num_rounds, say=print)
    assert set(record) == set(TRAIN_FIELDS)
    assert record["wrong"] == 0
    assert record["loss"] == record["baseline_loss"]
    assert record["loss_check"] == "exact"
    assert record["native_calls"] > 0
    assert record["delegated_calls"] == 0
    assert record["steps"] == 10
    assert record["num_blocks"] == 5 * num_rounds
    assert len(record["round_speedups"]) == num_rounds
    traces = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*.json"))
    arms = [f"{arm}-rank{rank}.json" for arm in ("deepytorch", "gloo") for rank in range(2)]
    assert traces == [
        Path(f"round{number}", arm) for number in range(1, num_rounds + 1) for arm in arms
    ]
    assert "all_gather" in (tmp_path / f"round{num_rounds}" / "deepytorch-rank1.json").read_text()
    low, high = record["speedup_spread"]
    assert 0 < low <= record["speedup"] <= high


@pytest.mark.extended
def test_the_sums_of_three_ranks_may_differ_in_the_last_bits():
    job = TrainJob(**TINY, framework="ddp", world_size=3)
    record = rounds.compare(job, rounds=1, say=print)
    assert record["wrong"] == 0
    assert record["loss_difference"] < 1e-3
    assert record["native_calls"] > 0
