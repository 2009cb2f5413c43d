"""Ranks of DistributedDataParallel whose helpers compile, each as long as it takes."""

from __future__ import annotations

import copy
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core import config, decisions
from deepytorch_core.compile import ahead, policies, regions, taking_over, timeouts
from deepytorch_core.config import Options
from deepytorch_core.testing import spawn_ranks

BUDGET_S = 1e4
SLOW_S = 2.0  # that rank 1's helper takes longer for each part


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(16), Part(12)
        self.outward = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.second(self.first(x)))


def limit_s() -> float:
    """How long collectives wait for a rank."""
    (backend,) = timeouts._backends(dist.group.WORLD)
    return float(backend.options._timeout.total_seconds())


def train(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float], Any]:
    """Losses, stock's, and alike: parts that helpers had, limits above the usual one, decision."""
    ahead._num_helpers = lambda: 1
    ahead.why_not = lambda root, device: None
    ahead.MODEL_IN_PARTS = 1
    regions.SMALLEST_SHARES = (2, 64)
    taking_over.ASK_S = 0.2
    policies.automatic = lambda device: [policies.get("aot-eager")]  # no kernels to be waited for
    asked = ahead._asked
    if rank == 1:
        ahead._asked = lambda *args: (time.sleep(SLOW_S), asked(*args))[1]
    config._current = Options(profile=f"{folder}/p.json", log="error", compile_budget_s=BUDGET_S)
    torch.manual_seed(0)
    model = Whole()
    stock = DistributedDataParallel(copy.deepcopy(model))
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    ours = DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2) for one in (ours, stock)]
    losses: tuple[list[float], list[float]] = ([], [])
    prepared: list[int] = []
    usual_s, limits_s = limit_s(), []
    while not found.is_settled:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2 * len(prepared) + rank))
        for kept, one, optimizer in zip(losses, (ours, stock), optimizers, strict=True):
            loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss.item())
        if found.is_waiting:
            prepared.append(sum(one.is_prepared for one in found.regions))
            limits_s.append(limit_s() - usual_s)
            time.sleep(0.05)  # steps would take the helpers' time
    made = [one for one in decisions.made() if one["what"] == "compile of Whole"]
    return *losses, (prepared, limits_s, made[-1]["chosen"])


@pytest.mark.timeout(200)
def test_ranks_take_over_each_part_in_the_same_step(tmp_path: Path) -> None:
    first, second = spawn_ranks(train, 2, str(tmp_path), backend="gloo", timeout_s=180.0)
    for ours, stock, _ in (first, second):
        assert ours == pytest.approx(stock, rel=1e-4)
    assert first[2] == second[2]
    prepared, limits_s, chosen = first[2]
    # One part's budget beside the usual limit, once all have been captured.
    assert limits_s[0] == 3 * BUDGET_S
    assert limits_s[9:11] == [BUDGET_S, BUDGET_S]
    assert prepared[0] == prepared[10] == 3
    assert {before - after for before, after in itertools.pairwise(prepared)} == {0, 1}
    assert chosen in ("aot-eager", "eager")
