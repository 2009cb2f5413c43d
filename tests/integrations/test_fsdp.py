"""FSDP1 and FSDP2 on deepytorch: stock's losses, natively, in registered memory; and undone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)

import deepytorch
from deepytorch.integrations import fsdp
from deepytorch_core.testing import spawn_ranks

STEPS = 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(13, 39), Block(39), Block(39), nn.Linear(39, 5))


def train(model: nn.Module, rank: int, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 13, generator=data)
        loss = (model(x).float() - x[:, :5]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def stock_group() -> None:
    """A group of torch's own; importing this module has activated deepytorch."""
    warnings.simplefilter("ignore")
    deepytorch.deactivate()
    dist.init_process_group("gloo")


def native_ops() -> set[str]:
    return {row.op for row in deepytorch.report().rows if row.algorithm != "delegate"}


def in_registered_memory() -> int:
    from deepytorch_core import _core

    return _core.registered_memory()["reserved_bytes"]


# FSDP1.


def fsdp1(strategy: ShardingStrategy, **kwargs: Any) -> Any:
    warnings.simplefilter("ignore")
    return FullyShardedDataParallel(
        make_model(),
        sharding_strategy=strategy,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        **kwargs,
    )


def train_fsdp1(
    rank: int, world_size: int, strategy: ShardingStrategy, kwargs: dict[str, Any]
) -> tuple[list[float], list[float], set[str], int]:
    stock_group()
    stock = train(fsdp1(strategy, **kwargs), rank)
    model = fsdp1(strategy, **kwargs)
    fsdp.register_comm_hook(model)
    fsdp.register_comm_hook(model)
    assert dist.get_backend() == "deepytorch"
    ours = train(model, rank)
    native, placed = native_ops(), in_registered_memory()
    units = FullyShardedDataParallel.fsdp_modules(model)
    assert all(unit._comm_hook is not None for unit in units)
    assert fsdp.undo(model)
    assert not fsdp.undo(model)
    assert all((unit._comm_hook, unit._comm_hook_state) == (None, None) for unit in units)
    assert (dist.get_backend(), deepytorch.is_active()) == ("gloo", False)
    train(model, rank, 1)
    return stock, ours, native, placed


HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("strategy", "kwargs", "world_size"),
    [
        (ShardingStrategy.FULL_SHARD, {}, 2),
        (ShardingStrategy.FULL_SHARD, {"mixed_precision": HALF}, 2),
        (ShardingStrategy.SHARD_GRAD_OP, {}, 3),
        (ShardingStrategy.NO_SHARD, {}, 2),
    ],
)
def test_fsdp1_has_stocks_losses(
    strategy: ShardingStrategy, kwargs: dict[str, Any], world_size: int
) -> None:
    sharded = strategy is not ShardingStrategy.NO_SHARD
    results = spawn_ranks(train_fsdp1, world_size, strategy, kwargs, fresh=True)
    for stock, ours, native, placed in results:
        assert ours == (stock if world_size == 2 else pytest.approx(stock, rel=1e-5))
        assert native >= ({"all_gather", "reduce_scatter"} if sharded else {"all_reduce"})
        assert (placed > 0) == sharded


# FSDP2.


def fsdp2(world_size: int, **kwargs: Any) -> Any:
    model: Any = make_model()
    mesh = kwargs.pop("mesh", None) or init_device_mesh("cpu", (world_size,))
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def train_fsdp2(rank: int, world_size: int) -> tuple[list[float], list[float], set[str], int]:
    stock_group()
    stock = train(fsdp2(world_size), rank)
    model = fsdp2(world_size)
    comms = communication(model)
    assert fsdp.apply_fsdp2(model) is model
    assert communication(model) != comms
    placed = communication(model)
    fsdp.apply_fsdp2(model)
    assert communication(model) == placed
    ours = train(model, rank)
    native, memory = native_ops(), in_registered_memory()
    assert fsdp.undo(model)
    assert communication(model) == comms
    return stock, ours, native, memory


def communication(model: nn.Module) -> list[Any]:
    units = fsdp._fsdp2_units(model)[1]
    return [(unit._all_gather_comm, unit._reduce_scatter_comm) for unit in units]


def test_fsdp2_has_stocks_losses() -> None:
    for stock, ours, native, placed in spawn_ranks(train_fsdp2, 2, fresh=True):
        assert ours == stock
        assert native >= {"all_gather", "reduce_scatter"}
        assert placed > 0
