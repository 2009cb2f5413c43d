"""`bench train --workload` with real ranks, at tiny scale."""

from __future__ import annotations

import pytest

from deepytorch.workloads.headline.job import ArmJob, TogetherJob
from deepytorch.workloads.headline.run import compare, compare_together

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.mark.extended
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


def test_both_arms_train_in_the_same_processes() -> None:
    told: list[str] = []
    record = compare_together(
        TogetherJob(workload="bert-amp", scale="tiny", world_size=2, steps=5),
        rounds=1,
        say=told.append,
    )
    assert record["wrong"] == 0
    assert record["together"] is True
    assert record["loss_difference"] < 1e-3
    assert record["collectives_only"][0] > 0
    plain, ours = (record["arms"][name] for name in ("plain", "ours-collectives"))
    assert plain["native_calls"] == 0
    assert ours["native_calls"] > 0
    # The same batches, and as many of them, in the timed steps of both.
    assert len(plain["samples_us"][0]) == len(ours["samples_us"][0]) == record["steps"]
    assert plain["units_per_s"] * sum(plain["samples_us"][0]) == pytest.approx(
        ours["units_per_s"] * sum(ours["samples_us"][0]), rel=1e-3
    )
    assert [line.split()[2] for line in told] == ["ours-collectives", "plain"]
