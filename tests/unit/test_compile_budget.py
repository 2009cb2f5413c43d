"""Compiling ends where its budget is spent: `time` is made up, nothing is slow here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.compile import region as region_module
from deepytorch_core.compile.policies import Policy, register_policy

pytestmark = pytest.mark.usefixtures("own_profile")

COMPILE_S = 40.0  # of each graph


class InPieces(nn.Module):
    """Captured in three graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        x = self.two(x)
        torch._dynamo.graph_break()
        return self.three(x)


class Whole(nn.Module):
    """Captured in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).square()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock; every graph that is compiled puts it on."""
    seconds = [0.0]

    class Slow(Policy):
        name = "slow"

        def compile_graph(self, graph: Any, inputs: Any) -> Any:
            seconds[0] += COMPILE_S
            return graph.forward

    register_policy(Slow)
    monkeypatch.setattr(region_module.time, "perf_counter", lambda: seconds[0])
    return seconds


def trained(model: nn.Module, budget_s: float, *batches: int) -> Any:
    """The only region of a model after steps of those sizes; each gives what eager code does."""
    eager = type(model)()
    eager.load_state_dict(model.state_dict())
    deepytorch.compile(model, "slow", budget_s=budget_s)
    for batch in batches:
        x = torch.randn(batch, 5)
        torch.testing.assert_close(model(x), eager(x))
    compilation = engine.compilation_of(model)
    assert compilation is not None
    (region,) = compilation.regions
    return region


def test_budget_ends_compiling(now: list[float]) -> None:
    model = Whole()
    region = trained(model, COMPILE_S - 1, 4, 4, 4)
    assert region.failure is None  # what has been compiled stays
    assert region.told.chosen == {"slow": 1}
    model(torch.randn(6, 5))
    assert "its compile budget of 39 s is spent" in str(region.failure)
    assert now == [COMPILE_S]


@pytest.mark.parametrize(("budget_s", "compiled"), [(60.0, 1), (120.0, 2), (200.0, 3)])
def test_budget_ends_within_a_call(now: list[float], budget_s: float, compiled: int) -> None:
    """No graph but the first begins after half of it."""
    region = trained(InPieces(), budget_s, 4, 4, 4)
    assert region.failure is None
    assert region.told.chosen == {"slow": compiled}
    spent = {"the rest of it": f"its compile budget of {budget_s:g} s is spent"}
    assert region.told.dropped == (spent if compiled < 3 else {})
    assert now == [compiled * COMPILE_S]
