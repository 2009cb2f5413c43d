"""Helpers compile for many sizes what Dynamo has captured for two of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.compile import ahead, any_size, policies, regions
from deepytorch_core.compile.ahead import Ahead
from deepytorch_core.compile.region import CompiledRegion

pytestmark = pytest.mark.timeout(600)

CPU = torch.device("cpu")
LENGTHS = (6, 10, 14, 22)


@pytest.fixture(autouse=True)
def helped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One helper, for any model."""
    monkeypatch.setattr(ahead, "_num_helpers", lambda: 1)
    monkeypatch.setattr(ahead, "why_not", lambda device: None)
    options = Options(profile=str(tmp_path / "p.json"), log="error", compile_budget_s=1e4)
    monkeypatch.setattr(config, "_current", options)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Part(nn.Module):
    """A part that goes by its input's length."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(x.shape[0] // 2, 2, -1)
        return x + nn.functional.silu(heads.transpose(1, 2)).transpose(1, 2).reshape(x.shape)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(number)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(LENGTHS[number % len(LENGTHS)], 8)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_later_sizes_take_neither_a_capture_nor_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Stack()
    stock = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(network.parameters(), lr=1e-3) for network in (model, stock)]
    (found,) = regions.find(model)
    assert len(found.modules) == 4
    policy = policies.get("inductor")
    region = CompiledRegion(found, [policy], budget_s=100.0, is_on=lambda _: True)
    region.install()
    helpers = Ahead(CPU, policy.name, budget_s=100.0)
    region.send_later(helpers)
    counters.clear()
    # The first part's input has no gradient, so it has graphs of its own. That of the first size
    # for all others may come twice: for itself, and as one of any.
    wanted = 2 * len(LENGTHS)
    for number in range(8_000):
        ours, expected = (
            step(network, optimizer, number)
            for network, optimizer in zip((model, stock), optimizers, strict=True)
        )
        assert ours == pytest.approx(expected, rel=1e-2)
        if len(region._jobs) == region.told.chosen.get(policy.name, 0) >= wanted:
            break
        time.sleep(0.05 if region.is_waiting else 0.0)
    assert region.failure is None
    assert region.is_captured_once
    assert wanted <= len(region._jobs) <= wanted + 2
    assert region.told.chosen == {"inductor": len(region._jobs)}
    # The first size for itself and the second for any, each with and without that gradient.
    assert counters["frames"]["ok"] <= 4
    assert not counters["aot_autograd"]["autograd_cache_miss"]
    assert counters["aot_autograd"]["autograd_cache_hit"] >= wanted
    for mine, other in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-2, atol=5e-3)
    helpers.close()
    region.remove()


def test_what_no_graph_of_fixed_sizes_is_made_of_is_captured_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(any_size, "why_not", lambda graph: "it is not to be")
    torch.manual_seed(0)
    model = Stack()
    (found,) = regions.find(model)
    policy = policies.get("aot-eager")
    region = CompiledRegion(found, [policy], budget_s=100.0, is_on=lambda _: True)
    region.install()
    helpers = Ahead(CPU, policy.name, budget_s=100.0)
    region.send_later(helpers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(8_000):
        step(model, optimizer, number)
        if region.told.chosen.get(policy.name, 0) >= 2 * len(LENGTHS):
            break
        time.sleep(0.05 if region.is_waiting else 0.0)
    assert region.failure is None
    assert not region.is_captured_once
    assert len(region._jobs) == 2 * len(LENGTHS)
    helpers.close()
    region.remove()
