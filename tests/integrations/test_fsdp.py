"""FSDP1 and FSDP2 on deepytorch: stock's losses, natively, in registered memory; and undone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

import deepytorch
from deepytorch.integrations import fsdp
from deepytorch.integrations.fsdp import trial as _fsdp_trial
from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import spawn_ranks

STEPS = 6
MEASURED_STEPS = 20  # as many as FSDP2's measurement takes


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
    assert serving_name() == "deepytorch"
    ours = train(model, rank)
    native, placed = native_ops(), in_registered_memory()
    units = FullyShardedDataParallel.fsdp_modules(model)
    assert all(unit._comm_hook is not None for unit in units)
    assert fsdp.undo(model)
    assert not fsdp.undo(model)
    assert all((unit._comm_hook, unit._comm_hook_state) == (None, None) for unit in units)
    assert (serving_name(), deepytorch.is_active()) == ("gloo", False)
    train(model, rank, 1)
    return stock, ours, native, placed


HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("strategy", "kwargs", "world_size"),
    [
        pytest.param(ShardingStrategy.FULL_SHARD, {}, 2, marks=pytest.mark.extended),
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


def compressed(rank: int, world_size: int, strategy: ShardingStrategy) -> None:
    from deepytorch_core import _core

    model = FullyShardedDataParallel(
        nn.Linear(4000, 1, bias=False),
        sharding_strategy=strategy,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    fsdp.register_comm_hook(model, compress="bf16")
    inputs = [
        torch.randn(1, 4000, generator=torch.Generator().manual_seed(peer))
        for peer in range(world_size)
    ]
    _core.reset_statistics()
    model(inputs[rank]).sum().backward()
    # Divided, rounded, added in float32, rounded once more, divided: as FSDP1 averages.
    before, after = model._gradient_predivide_factor, model._gradient_postdivide_factor
    total = (inputs[0] / before).bfloat16().float()
    for tensor in inputs[1:]:
        total = total + (tensor / before).bfloat16().float()
    expected = total.bfloat16().float() / after
    gradient = model.module.weight.grad
    sharded = strategy is not ShardingStrategy.NO_SHARD
    if sharded:
        expected = expected.chunk(world_size, dim=1)[rank]
    assert torch.equal(gradient.flatten(), expected.flatten())
    op = "reduce_scatter" if sharded else "all_reduce"
    (row,) = [row for row in deepytorch.report().rows if row.op == op]
    assert (row.algorithm != "delegate", row.bytes) == (
        True,
        8000 // (world_size if sharded else 1),
    )


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_fsdp1_sends_bf16_and_adds_in_float32(strategy: ShardingStrategy, world_size: int) -> None:
    spawn_ranks(compressed, world_size, strategy, backend="deepytorch")


# FSDP2.


def fsdp2(world_size: int, **kwargs: Any) -> Any:
    """Every block sharded by itself, and what remains by the root; on a mesh made for it."""
    model: Any = kwargs.pop("model", None) or make_model()
    mesh = kwargs.pop("mesh", None) or init_device_mesh("cpu", (world_size,))
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def plain(world_size: int) -> Any:
    return fsdp2(world_size)


def half_precision(world_size: int) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(world_size, mp_policy=policy)


def activation_checkpointing(world_size: int) -> Any:
    model = make_model()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return fsdp2(world_size, model=model)


def cpu_offload(world_size: int) -> Any:
    return fsdp2(world_size, offload_policy=CPUOffloadPolicy(pin_memory=False))


def compiled_blocks(world_size: int) -> Any:
    model: Any = make_model()
    for block in model:
        if isinstance(block, Block):
            block.compile(backend="aot_eager")
    return fsdp2(world_size, model=model)


def compiled_whole(world_size: int) -> Any:
    return torch.compile(fsdp2(world_size), backend="aot_eager")


def only_blocks(world_size: int) -> Any:
    """The root is not sharded, and parameters outside the blocks are not trained."""
    model: Any = make_model()
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=init_device_mesh("cpu", (world_size,)))
        else:
            block.requires_grad_(False)
    return model


def hybrid(world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp2(world_size, mesh=mesh)


def hybrid_half_precision(world_size: int) -> Any:
    """On a mesh of its own making: ranks 0 and 2 shard, 1 and 3 do."""
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(world_size, mesh=mesh, mp_policy=policy)


WAYS: dict[str, Callable[[int], Any]] = {
    way.__name__: way
    for way in (
        plain,
        half_precision,
        activation_checkpointing,
        cpu_offload,
        compiled_blocks,
        compiled_whole,
        only_blocks,
        hybrid,
        hybrid_half_precision,
    )
}


def communication(model: nn.Module) -> list[Any]:
    """How each unit communicates, and the units' groups and their backends."""
    units = fsdp._fsdp2_units(model)[1]
    return [(unit._all_gather_comm, unit._reduce_scatter_comm) for unit in units]


def backends(model: nn.Module) -> set[str]:
    units = fsdp._fsdp2_units(model)[1]
    return {serving_name(group) for unit in units for group in fsdp._groups_of(unit)}


def train_fsdp2(
    rank: int, world_size: int, ways: list[str], options: dict[str, Any]
) -> dict[str, Any]:
    from deepytorch_core import _core

    stock_group()
    steps = MEASURED_STEPS if options else STEPS
    results = {}
    for way in ways:
        torch._dynamo.reset()
        stock = train(WAYS[way](world_size), rank, steps)
        model = WAYS[way](world_size)
        before = communication(model)
        assert backends(model) == {"gloo"}
        assert fsdp.apply_fsdp2(model, **options) is model
        assert backends(model) == {"deepytorch"}
        placed = communication(model)
        fsdp.apply_fsdp2(model)
        assert communication(model) == placed != before
        _core.reset_statistics()
        ours = train(model, rank, steps)
        native = native_ops()
        decision = deepytorch.report().decisions[-1]
        assert in_registered_memory() > 0
        assert fsdp.undo(model)
        assert not fsdp.undo(model)
        assert communication(model) == before
        assert (backends(model), deepytorch.is_active()) == ({"gloo"}, False)
        train(model, rank, 1)
        results[way] = {"stock": stock, "ours": ours, "native": native, "decision": decision}
    return results


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [
        (2, [way for way in WAYS if not way.startswith("hybrid")]),
        (4, ["hybrid_half_precision"]),
        pytest.param(4, ["hybrid"], marks=pytest.mark.extended),
    ],
)
def test_fsdp2_has_stocks_losses(
    world_size: int, ways: list[str], deepspeeds_ranks: dict[str, Any]
) -> None:
    # These ranks have imported torch's compiler, too.
    how = {**deepspeeds_ranks, "timeout_s": 100}
    for result in spawn_ranks(train_fsdp2, world_size, ways, {}, **how):
        for way, got in result.items():
            assert got["ours"] == (
                got["stock"] if world_size == 2 else pytest.approx(got["stock"], rel=1e-5)
            ), way
            assert got["native"] >= {"all_gather", "reduce_scatter"}, way
            if world_size == 4:
                assert "all_reduce" in got["native"], way
            assert got["decision"] == {
                "what": "FSDP2 buffers",
                "chosen": "in registered memory",
                "reason": "not measured: tune=off",
                "times_ms": {},
            }


class FakeClock:
    """Goes on by a second with one kind of buffer, by two with the other."""

    def __init__(self, quick: str) -> None:
        self.trial: Any = None
        self._quick, self._now = quick, 0.0

    def perf_counter(self) -> float:
        self._now += 1.0 if self.trial.kind == self._quick else 2.0
        return self._now


def measured(rank: int, world_size: int, quick: str, profile: Path) -> Any:
    clock = FakeClock(quick)
    start = _fsdp_trial.RegistrationTrial.start

    def watched(trial: Any) -> None:
        clock.trial = trial
        start(trial)

    _fsdp_trial.RegistrationTrial.start = watched  # type: ignore[method-assign]
    _fsdp_trial.time = clock  # type: ignore[assignment]
    options = {"tune": "force", "profile": profile}
    return train_fsdp2(rank, world_size, ["hybrid"], options)["hybrid"]


@pytest.mark.parametrize(
    "quick",
    [
        pytest.param(kind, marks=[pytest.mark.extended] * (kind == "registered"))
        for kind in _fsdp_trial._KINDS
    ],
)
def test_fsdp2_keeps_the_faster_buffers(
    quick: str, tmp_path: Path, deepspeeds_ranks: dict[str, Any]
) -> None:
    for result in spawn_ranks(measured, 4, quick, tmp_path / "profile.json", **deepspeeds_ranks):
        assert result["ours"] == pytest.approx(result["stock"], rel=1e-5)
        assert result["decision"]["chosen"] == f"in {quick} memory"
        assert set(result["decision"]["times_ms"]) == {"registered", "ordinary"}
