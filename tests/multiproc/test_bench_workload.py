"""`bench train --workload` with real ranks, at tiny scale."""

from __future__ import annotations

import pytest

from deepytorch.workloads.headline.job import ArmJob
from deepytorch.workloads.headline.run import compare

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.mark.parametrize("workload", ["llama-1b-varlen", "llama-1b-fsdp2"])
def test_arms_take_turns_and_train_alike(workload: str) -> None:
    told: list[str] = []
    record = compare(
        ArmJob(workload=workload, scale="tiny", world_size=2, steps=3),
        rounds=1,
        split=True,
        say=told.append,
        only=("plain", "ours-collectives"),
    )
    assert record["wrong"] == 0
    assert record["loss_difference"] < 1e-3
    assert record["against_plain"] is None
    assert record["collectives_only"][0] > 0
    assert record["arms"]["plain"]["native_calls"] == 0
    assert record["arms"]["ours-collectives"]["native_calls"] > 0
    assert len(record["arms"]["plain"]["samples_us"][0]) == 3
    assert [line.split()[2] for line in told] == ["plain", "ours-collectives"]
