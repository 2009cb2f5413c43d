"""Compiled blocks with fused kernels in them, and floats that a compiler wants constant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.nn.swaps import _forward, rms_norm

pytestmark = pytest.mark.usefixtures("own_profile")


class OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnRMSNorm()
        self.up = nn.Linear(8, 8)
        self.scale = 0.37

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.norm(x)) * self.scale


def _stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(4)])


def _train(model: nn.Module, sizes: list[int]) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for size in sizes:
        loss = model(torch.randn(size, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_compile_equal_blocks_share_a_compile_with_their_norms_replaced() -> None:
    model = _stack()
    for module in model.modules():
        if isinstance(module, OwnRMSNorm):
            _forward.replace(module, rms_norm._rms_norm)
    deepytorch.compile(model, "aot-eager")
    losses = _train(model, [5] * 4)
    compilation: Any = engine.compilation_of(model)
    (region,) = compilation.regions
    assert region.told.num_compiles == 1
    assert region.failure is None
    assert losses == pytest.approx(_train(_stack(), [5] * 4), rel=1e-5)


def test_compile_a_float_that_must_be_constant_restarts_the_capture() -> None:
    model = _stack()
    deepytorch.compile(model, "inductor")
    compilation: Any = engine.compilation_of(model)
    _train(model, [5])
    (region,) = compilation.regions
    region._is_dynamic = True
    region._compiled = region._compile()
    region.told.dropped.clear()
    sizes = [7, 9, 6]
    losses = _train(model, sizes)
    assert region.failure is None
    assert not region.told.dropped
    expected = _stack()
    _train(expected, [5])
    assert losses == pytest.approx(_train(expected, sizes), rel=1e-4)
