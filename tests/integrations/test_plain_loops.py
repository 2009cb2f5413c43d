"""Loops that call torch alone: what comes to their models unasked, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch.integrations.common import claims
from deepytorch.integrations.kernels import apply as kernels
from deepytorch.integrations.seams import plain
from deepytorch_core import compile as engine
from deepytorch_core.c10d import activation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Models that kernels came to, while everything is on in loops of one's own."""
    found: list[Any] = []

    def note(things: list[Any], *args: Any, **kwargs: Any) -> None:
        found.extend(thing for thing in things if isinstance(thing, nn.Module))

    monkeypatch.setattr(kernels, "apply", note)
    # Other tests' scripts have switched things off for their process, and searched.
    monkeypatch.setattr(claims, "_is_left", False)
    monkeypatch.setattr(plain, "_num_searches", 0)
    activation.leave_models_alone(False)
    deepytorch.activate(profile=str(tmp_path / "p.json"), patience="off", log="error")
    yield found
    deepytorch.deactivate()
    activation.leave_models_alone()
    torch._dynamo.reset()


def train(model: nn.Module, steps: int = 4) -> None:
    """A stage of training, with an optimizer of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.randn(3, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("is_part", [False, True])
def test_a_model_that_the_script_had_compiled_gets_no_kernels(
    is_part: bool, swapped: list[Any]
) -> None:
    trunk = nn.Sequential(*(Block() for _ in range(3)))
    model = nn.Sequential(trunk, nn.Linear(8, 1)) if is_part else trunk
    deepytorch.compile(trunk, "aot-eager")
    for _ in range(2):
        train(model)
    found: Any = engine.compilation_of(trunk)
    assert found.regions
    assert [region.failure for region in found.regions] == [None]
    assert swapped == []


def test_a_long_search_of_settings_goes_on_being_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_num_searches", plain._MOST_SEARCHES)
    least_s = plain._MOST_SEARCHES * plain._SEARCH_S / plain._LARGEST_SHARE
    assert not plain._may_search(least_s - 1.0)
    assert plain._may_search(least_s + 1.0)


def test_kernels_come_to_a_model_once(swapped: list[Any]) -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    for _ in range(2):
        train(model)
    assert swapped == [model]
