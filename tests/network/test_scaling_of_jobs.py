"""The cost of more nodes, by the report of a job over two emulated ones."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepytorch
from deepytorch_core.report import scaling as report_scaling
from deepytorch_core.testing import spawn_ranks
from deepytorch_core.testing.emulation import Network, Placement, Setting, seats

STEPS, COUNTS = 8, (50_001, 400_003)


def run(rank: int, world_size: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.0)
    for _ in range(STEPS):
        works = [dist.all_reduce(torch.ones(count), async_op=True) for count in COUNTS]
        time.sleep(0.01)  # as if it computed
        for work in works:
            work.wait()
        optimizer.step()
    return deepytorch.report().to_dict()


def test_a_job_over_nodes_is_forecast_for_nodes() -> None:
    with Network(2, Setting(rate_bps=2e8)) as network:
        placement = Placement(network, seats([2, 2]))
        reports = spawn_ranks(run, 4, backend="deepytorch", placement=placement)
    for report in reports:
        assert (report["nodes"], set(report["groups"].values())) == (2, {4})
        found = report_scaling.forecast(report)
        assert found["known"], found
        assert (found["unit"], found["today"], found["ranks_per_node"]) == ("nodes", 2, 2)
        (model,) = found["models"]
        assert (model["carrier"], model["schedule"]) == ("native", "hierarchical")
        # Both go over the one link, and there is nothing else that takes time by size.
        assert model["beta_us"] > 0
        steps = [row["step_ms"] for row in found["forecast"]]
        assert steps[0] == pytest.approx(found["step_ms"], abs=1e-3)
        assert steps == sorted(steps)
        assert steps[-1] > steps[0], "more than a hundredth of a second of it can't be hidden"
