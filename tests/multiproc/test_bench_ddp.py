"""`bench ddp` with real ranks and a tiny model."""

import pytest

from deepytorch_core.bench import launch
from deepytorch_core.bench.job import DdpJob
from deepytorch_core.bench.record import DDP_FIELDS

TINY = {"parameters": 4096, "batch_size": 2, "steps": 5}


def test_both_arms_train_the_same():
    world_size = 3
    (record,) = launch.run(DdpJob(**TINY, world_size=world_size))
    assert set(record) == set(DDP_FIELDS)
    assert record["wrong"] == 0
    assert record["algorithm"] != "delegate"
    assert record["registered"]  # as after `import deepytorch`
    assert record["steps"] == 5
    assert record["num_blocks"] == 5
    # Weights and biases, four bytes each.
    assert record["bytes_per_step"] == 4 * record["parameters"]
    assert 0 < record["step_time_us"]["p50"] <= record["step_time_us"]["p95"]
    low, high = record["speedup_spread"]
    assert 0 < low <= record["speedup"] <= high
    if world_size == 2:  # a sum of two does not depend on the order
        assert record["loss"] == record["baseline_loss"]
        assert record["loss_check"] == "exact"


@pytest.mark.extended
def test_gloo_against_itself():
    (record,) = launch.run(DdpJob(**TINY, world_size=2, ours="gloo"))
    assert record["algorithm"] == "gloo"
    assert not record["registered"]
    assert record["loss_check"] == "exact"
