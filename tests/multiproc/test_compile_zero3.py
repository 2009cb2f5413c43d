"""Blocks that ZeRO-3 gathers as a whole are compiled below its hooks; others run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.testing import spawn_ranks

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(8, 8)  # DeepSpeed's leaf modules need inputs with gradients
        self.layers = nn.ModuleList(Block() for _ in range(5))
        self.outward = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x)
        return self.outward(x).square().mean()


def train(rank: int, policy: str, *, leaves: bool) -> tuple[list[float], list[Any]]:
    """Losses, and of each region its number of blocks and why it runs eagerly, if it does."""
    import deepspeed

    torch.manual_seed(0)
    model = Stack()
    if leaves:
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    trained, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        },
    )
    if policy != "off":
        deepytorch.compile(trained, policy)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(2 * STEPS):
        loss = trained(torch.randn(4, 8, generator=generator))
        trained.backward(loss)
        trained.step()
        losses.append(loss.item())
    compiled = engine.compilation_of(trained)
    regions = [] if compiled is None else compiled.regions
    told = [
        (len(region.region.modules), region.failure, set(region.told.chosen)) for region in regions
    ]
    engine.undo_all()
    torch._dynamo.reset()
    return losses, told


def train_all(rank: int, world_size: int) -> list[tuple[list[float], list[Any]]]:
    deepytorch.deactivate()
    dist.init_process_group("gloo")
    return [
        train(rank, "off", leaves=False),
        train(rank, "aot-eager", leaves=True),
        train(rank, "inductor", leaves=True),
        train(rank, "aot-eager", leaves=False),
    ]


def test_compile_leaf_modules_of_zero3(deepspeeds_ranks: dict[str, Any]) -> None:
    for stock, eager_graphs, inductor, apart in spawn_ranks(
        train_all, 2, **deepspeeds_ranks, timeout_s=110
    ):
        for losses, _ in (eager_graphs, inductor, apart):
            assert losses == pytest.approx(stock[0], rel=1e-5)
        assert eager_graphs[1] == [(5, None, {"aot-eager"})]
        assert inductor[1] == [(5, None, {"inductor"})]
        assert apart[1] == []
