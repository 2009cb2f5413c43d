"""Accelerate's FSDP2 and DeepSpeed modes on deepytorch, against stock gloo, on CPU."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from torch import nn

import deepytorch
from deepytorch.integrations import accelerate as adapter
from deepytorch.integrations.common import around, contract
from deepytorch.integrations.seams import fsdp2 as _fsdp2
from deepytorch_core.base import agreement
from deepytorch_core.testing import place, rank_store, spawn_ranks

STEPS = 20


@contextlib.contextmanager
def process_state() -> Iterator[None]:
    """Accelerate keeps its state in the process, and workers are used again."""
    deepytorch.deactivate()  # importing this module has activated it
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    original = dist.init_process_group
    dist.init_process_group = lambda backend, **_: original(
        backend, store=rank_store("accelerate"), rank=place()[0], world_size=place()[1]
    )
    before = dict(os.environ)  # noqa: TID251  Accelerate's plugins set variables
    try:
        yield
    finally:
        os.environ.clear()  # noqa: TID251
        os.environ.update(before)  # noqa: TID251
        dist.init_process_group = original
        adapter._uninstall()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def batches() -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * STEPS, 16, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    return torch.utils.data.DataLoader(data, batch_size=4)


def train(accelerator: Accelerator) -> tuple[list[float], Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    losses = []
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def native_ops() -> dict[str, int]:
    rows = [row for row in deepytorch.report().rows if row.algorithm != "delegate"]
    return {op: sum(row.calls for row in rows if row.op == op) for op in {row.op for row in rows}}


def plugins(how: str) -> list[Any]:
    return [] if how == "stock" else [adapter.DeepytorchPlugin(compile="auto")]


def fsdp2(rank: int, world_size: int, how: str) -> dict[str, Any]:
    with process_state():
        # Accelerate shards on accelerators only; told that this is one, it does so on the CPU.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="size_based_wrap",
            min_num_params=10,
            cpu_ram_efficient_loading=False,
        )
        accelerator = Accelerator(fsdp_plugin=sharding, kwargs_handlers=plugins(how))
        assert accelerator.is_fsdp2
        losses, model = train(accelerator)
        undone = adapter.undo(accelerator)
        return {
            "losses": losses,
            "native": native_ops(),
            "placed": _fsdp2.place_buffers(model, contract.Changes()),
            "undone": undone,
            "prepare": around.is_put(accelerator, "prepare"),
        }


def test_fsdp2_gives_the_losses_of_gloo_by_native_collectives() -> None:
    stock = spawn_ranks(fsdp2, 2, "stock")
    ours = spawn_ranks(fsdp2, 2, "plugin")
    for rank in range(2):
        assert len(stock[rank]["losses"]) == STEPS
        assert ours[rank]["losses"] == stock[rank]["losses"]
        assert ours[rank]["native"]["all_gather"] >= 2 * STEPS
        assert ours[rank]["native"]["reduce_scatter"] >= 2 * STEPS
        assert ours[rank]["placed"] >= 3
        assert ours[rank]["undone"]
        assert not ours[rank]["prepare"]


def place_and_undo(rank: int, world_size: int) -> list[str | None]:
    dist.init_process_group("deepytorch", store=rank_store("fsdp2"), rank=rank, world_size=2)
    model = net()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    changes = contract.Changes()
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    _fsdp2.place_buffers(model, changes)
    seen = [type(group._all_gather_comm).__name__]
    changes.undo()
    seen.append(type(group._all_gather_comm).__name__)
    assert _fsdp2.place_buffers("no module", changes) == 0
    _fsdp2.place_buffers(model, changes)
    kept = weakref.ref(model)
    del model, group
    gc.collect()
    seen.append(kept())
    changes.undo()
    return seen


def test_fsdp2_buffers_are_placed_and_put_back() -> None:
    for seen in spawn_ranks(place_and_undo, 2):
        assert seen == ["ProcessGroupAllocAllGather", "DefaultAllGather", None]


def deepspeed(rank: int, world_size: int, how: str) -> dict[int, Any]:
    results = {}
    for stage in (2, 3):
        configuration: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        if how == "plugin":
            configuration["deepytorch"] = {"kernels": "auto", "staging_mb": 16}
        with process_state():
            before = native_ops()
            accelerator = Accelerator(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=configuration),
                # Without a backend Accelerate takes a CPU for a single process.
                kwargs_handlers=[InitProcessGroupKwargs(backend="gloo"), *plugins(how)],
            )
            assert accelerator.distributed_type == DistributedType.DEEPSPEED
            losses, engine = train(accelerator)
            flag = engine.config.get("deepytorch")
            adapter.undo(accelerator)
            results[stage] = {
                "losses": losses,
                "native": {op: n - before.get(op, 0) for op, n in native_ops().items()},
                "flag": flag,
                "undone": accelerator.deepspeed_config.get("deepytorch"),
            }
            accelerator.free_memory()  # the group stays: DeepSpeed sets up its own once a process
    return results


@pytest.mark.timeout(300)  # DeepSpeed compiles an operation of its own first
def test_deepspeed_gets_the_flag_and_gives_the_losses_of_gloo(
    deepspeeds_ranks: dict[str, Any],
) -> None:
    stock = spawn_ranks(deepspeed, 2, "stock", **deepspeeds_ranks, timeout_s=140)
    ours = spawn_ranks(deepspeed, 2, "plugin", **deepspeeds_ranks, timeout_s=140)
    for stage in (2, 3):
        for rank in range(2):
            assert ours[rank][stage]["losses"] == stock[rank][stage]["losses"]
            # "auto" would be Accelerate's to fill in; these options are in force anyhow.
            assert ours[rank][stage]["flag"] == {"staging_mb": 16, "enabled": True}
            assert ours[rank][stage]["undone"] == {"kernels": "auto", "staging_mb": 16}
            assert stock[rank][stage]["flag"] is None
        gathered = ours[0][stage]["native"]["all_gather"]
        assert gathered >= STEPS
    assert ours[0][2]["native"]["all_reduce"] >= STEPS
    assert ours[0][3]["native"]["reduce_scatter"] >= STEPS


def with_flag(rank: int, world_size: int, flag: Any, options: dict[str, Any]) -> Any:
    class Plugin:
        deepspeed_config = {"deepytorch": flag}

    class State:
        deepspeed_plugins = {"one": Plugin, "two": Plugin}

    class Fake:
        state, distributed_type = State, DistributedType.DEEPSPEED

        def prepare(self, *things: Any) -> Any:
            return things

        def log(self, values: Any) -> None:
            """Its trackers' affair."""

    dist.init_process_group("gloo", store=rank_store("flag"), rank=rank, world_size=world_size)
    accelerator = Fake()
    try:
        adapter._accelerator.apply(accelerator, options, adapter="accelerate")
    except contract.IntegrationError as error:
        return str(error)
    return Plugin.deepspeed_config["deepytorch"]


@pytest.mark.parametrize(
    ("flag", "options", "becomes"),
    [
        ({}, {}, {"enabled": True}),
        ({"tune": "force"}, {"tune": "off"}, {"tune": "off", "enabled": True}),
        ({"enabled": False}, {}, {"enabled": False}),
        (True, {}, 'accelerate: the DeepSpeed configuration has "deepytorch": True; it must be an'),
        ({"tuning": 1}, {}, "accelerate on rank 0: unknown option 'tuning'"),
    ],
)
def test_options_and_the_flag_are_one(flag: Any, options: dict[str, Any], becomes: Any) -> None:
    for seen in spawn_ranks(with_flag, 2, flag, options):
        assert seen.startswith(becomes) if isinstance(becomes, str) else seen == becomes


def enabled_on_rank_0(rank: int, world_size: int) -> str:
    agreement.HERE_LIMIT_S = 1.0  # a fresh process: put back with its end
    with process_state():
        plugin = adapter.DeepytorchPlugin(enabled=rank == 0)
        with pytest.raises(contract.IntegrationError) as error:
            Accelerator(cpu=True, kwargs_handlers=[plugin])
        return str(error.value)


def test_enabled_on_some_ranks_is_an_error_on_all() -> None:
    for message in spawn_ranks(enabled_on_rank_0, 2, fresh=True):
        assert message == (
            "accelerate: rank 0 was given enabled=True and rank 1 enabled=False: "
            "give every rank the same options"
        )
