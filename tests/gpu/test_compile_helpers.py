"""Helpers compile parts of a model on GPUs, for one rank and for several, with their strides."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.compile import ahead, regions
from deepytorch_core.testing import needs_gpus, spawn_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


class Part(nn.Module):
    """A convolution, and an attention that gives its rows back in the other memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 32), nn.Conv2d(32, 32, 3, padding=1)
        self.mix = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(nn.functional.silu(self.norm(x)))
        rows = x.permute(0, 2, 3, 1).reshape(len(x), -1, 32)
        mixed = self.mix(nn.functional.scaled_dot_product_attention(rows, rows, rows))
        return mixed.reshape(len(x), *x.shape[2:], 32).permute(0, 3, 1, 2).contiguous() + x


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Conv2d(3, 32, 3, padding=1)
        self.down = nn.ModuleList([Part(), Part()])
        self.middle = nn.Sequential(nn.Conv2d(32, 32, 1), nn.SiLU(), nn.Conv2d(32, 32, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for part in self.down:
            x = part(x)
        return self.middle(x)


def train(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Stock and ours on the same data; each rank's own."""
    torch.cuda.set_device(rank)
    ahead.MODEL_IN_PARTS = ahead.LEAST_HELPERS = 1
    regions.SMALLEST_SHARES = (3, 64)
    config._current = Options(profile=f"{folder}/p.json", log="info", tune="force", patience="off")
    torch.manual_seed(0)
    stock: Any = Whole().to("cuda", memory_format=torch.channels_last)
    model: Any = copy.deepcopy(stock)
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    if world_size > 1:
        stock, model = (
            DistributedDataParallel(network, device_ids=[rank]) for network in (stock, model)
        )
    optimizers = [torch.optim.SGD(network.parameters(), lr=1e-2) for network in (stock, model)]
    counters.clear()
    losses: tuple[list[float], list[float]] = ([], [])
    num_waited = 0
    while not found.is_settled:
        generator = torch.Generator("cuda").manual_seed(2 * len(losses[0]) + rank)
        x = torch.randn(4, 3, 16, 16, device="cuda", generator=generator)
        x = x.to(memory_format=torch.channels_last)
        for kept, network, optimizer in zip(losses, (stock, model), optimizers, strict=True):
            with torch.autocast("cuda", torch.bfloat16):
                loss = network(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss.item())
        num_waited += found.is_waiting
        time.sleep(0.02 if found.is_waiting else 0.0)
    return {
        "losses": losses,
        "waited": num_waited,
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "decided": [(decision["what"], decision["chosen"]) for decision in decisions.made()],
    }


def check(found: dict[str, Any]) -> None:
    stock, ours = found["losses"]
    assert ours == pytest.approx(stock, rel=2e-2, abs=1e-3)
    assert found["waited"] > 10
    # Three parts, one of which is met with tensors of two memory formats.
    assert found["hits"] >= 4, found
    assert found["misses"] == 0, found


@needs_gpus(1)
def test_a_rank_alone(tmp_path: Any) -> None:
    (found,) = spawn_ranks(train, 1, str(tmp_path), backend="nccl", timeout_s=200.0)
    check(found)


@needs_gpus(2)
@pytest.mark.parametrize("backend", ["nccl", "cuda:deepytorch,cpu:deepytorch"])
def test_ranks_together(backend: str, tmp_path: Any) -> None:
    both = spawn_ranks(train, 2, str(tmp_path), backend=backend, timeout_s=200.0)
    for found in both:
        check(found)
    assert both[0]["decided"] == both[1]["decided"]
    assert both[0]["waited"] == both[1]["waited"]
