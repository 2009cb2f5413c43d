"""Tests of the FSDP adapters' refusals: a line with the way out on all ranks, nothing changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import deepytorch
from deepytorch.integrations import fsdp
from deepytorch.integrations.common import groups
from deepytorch.integrations.common.contract import IntegrationError
from deepytorch_core.base.config import Options
from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import spawn_ranks


def stock_group() -> None:
    """A group of torch's own; importing this module has activated deepytorch."""
    warnings.simplefilter("ignore")
    deepytorch.deactivate()
    dist.init_process_group("gloo")


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def fsdp1(**kwargs: Any) -> Any:
    return FullyShardedDataParallel(linear(), device_id=torch.device("cpu"), **kwargs)


def fsdp2() -> Any:
    return fully_shard(linear(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def hybrid(strategy: ShardingStrategy) -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp1(sharding_strategy=strategy, device_mesh=mesh)


def with_hook() -> Any:
    from torch.distributed.algorithms._comm_hooks import default_hooks

    model = fsdp1()
    model.register_comm_hook(
        default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook
    )
    return model


def part() -> Any:
    model: Any = FullyShardedDataParallel(
        nn.Sequential(fsdp1(), nn.Linear(3, 3)), device_id=torch.device("cpu")
    )
    model(torch.ones(1, 3))
    return model.module[0]


class OwnAllGather:
    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


def with_own_all_gather() -> Any:
    model = fsdp2()
    model.set_custom_all_gather(OwnAllGather())
    return model


REFUSED: list[tuple[Callable[..., Any], Callable[[], Any], str]] = [
    (fsdp.register_comm_hook, linear, "Sequential is not FSDP1's: wrap it in FullySharded"),
    (fsdp.register_comm_hook, lambda: None, "NoneType is not FSDP1's: wrap it in FullySharded"),
    (fsdp.register_comm_hook, fsdp2, "fully_shard was applied to it, so use apply_fsdp2"),
    (fsdp.register_comm_hook, part, "this is a part of an FSDP model: pass the root"),
    (fsdp.register_comm_hook, with_hook, "the model has a hook, reduce_scatter_hook: FSDP1 takes"),
    (
        fsdp.register_comm_hook,
        lambda: hybrid(ShardingStrategy.HYBRID_SHARD),
        "FSDP1 takes no hook with HYBRID_SHARD: use FSDP2's hybrid sharding, fully_shard() with a "
        "2-D mesh, and apply_fsdp2",
    ),
    (
        fsdp.register_comm_hook,
        lambda: hybrid(ShardingStrategy._HYBRID_SHARD_ZERO2),
        "FSDP1 takes no hook with _HYBRID_SHARD_ZERO2: use FSDP2's",
    ),
    (fsdp.apply_fsdp2, linear, "Sequential is not FSDP2's: call fully_shard() on it first"),
    (fsdp.apply_fsdp2, lambda: 3, "int is not FSDP2's: call fully_shard() on it first"),
    (fsdp.apply_fsdp2, fsdp1, "it is FSDP1's, so use register_comm_hook"),
    (fsdp.apply_fsdp2, with_own_all_gather, "the model has communication of its own, OwnAllGather"),
]


def refused(rank: int, world_size: int) -> list[str]:
    stock_group()
    said = []
    for apply, make, _ in REFUSED:
        model = make()
        with pytest.raises(IntegrationError) as error:
            apply(model)
        said.append(str(error.value))
        assert (serving_name(), deepytorch.is_active()) == ("gloo", False)
        assert not isinstance(model, nn.Module) or not fsdp.undo(model)
    return said


def test_a_model_that_it_is_not_for() -> None:
    for said in spawn_ranks(refused, 2, fresh=True):
        for message, (apply, _, expected) in zip(said, REFUSED, strict=True):
            assert message.partition(": ")[0].split(" ")[0] == apply.__name__
            assert expected in message
            assert "\n" not in message


def wrong_arguments(rank: int, world_size: int) -> list[str]:
    stock_group()
    said = []
    wrapped, sharded = fsdp1(), fsdp2()

    def attempt(apply: Callable[..., Any], model: Any, *keywords: dict[str, Any]) -> None:
        with pytest.raises(IntegrationError) as error:
            apply(model, **keywords[min(rank, len(keywords) - 1)])
        said.append(str(error.value))

    attempt(fsdp.register_comm_hook, wrapped, {}, {"compress": "int8"})
    attempt(fsdp.register_comm_hook, wrapped, {"compress": "bf16"}, {})
    attempt(fsdp.register_comm_hook, wrapped, {"colectives": "native"})
    attempt(fsdp.apply_fsdp2, sharded, {"tune": "off"}, {"tune": "perhaps"})
    attempt(fsdp.apply_fsdp2, sharded, {"tune": "off"}, {"tune": "auto"})
    assert (serving_name(), deepytorch.is_active()) == ("gloo", False)
    fsdp.register_comm_hook(wrapped, compress="bf16")
    attempt(fsdp.register_comm_hook, wrapped, {})
    return said


def test_a_wrong_argument_on_any_rank() -> None:
    for said in spawn_ranks(wrong_arguments, 2, fresh=True):
        assert said[0].endswith("compress='int8': expected one of None, 'bf16'")
        assert "rank 0 was given compress='bf16' and rank 1 compress=None: give every" in said[1]
        assert "unknown option 'colectives' (did you mean collectives?); valid options" in said[2]
        assert "rank 1: tune='perhaps': expected one of auto, off, force" in said[3]
        assert "rank 0 was given tune='off' and rank 1 tune='auto'" in said[4]
        assert said[5].endswith("called before with another compress: call undo(model) first")


def on_cuda(rank: int, world_size: int) -> list[str]:
    """Without a GPU: what a model on one would be told."""
    stock_group()
    said, cuda = [], torch.device("cuda")
    for group in (dist.group.WORLD, dist.new_group(backend="cpu:gloo")):
        assert isinstance(group, dist.ProcessGroup)
        groups.require_served("x", group, cuda, Options(collectives="stock"))
        with pytest.raises(IntegrationError) as error:
            groups.require_served("x", group, cuda, Options())
        said.append(str(error.value))
    return said


def test_a_cuda_model_on_a_group_of_gloo() -> None:
    for both, cpu in spawn_ranks(on_cuda, 2, fresh=True):
        assert both.startswith(
            "x: the model is on cuda, which its group serves by gloo (cpu:gloo,cuda:gloo): call "
            "init_process_group() without a backend"
        )
        assert cpu.startswith("x: the model is on cuda, which its group does not serve (cpu:gloo)")


def left_alone(rank: int, world_size: int) -> None:
    stock_group()
    wrapped, sharded = fsdp1(), fsdp2()
    comms = vars(fsdp._fsdp2_units(sharded)[1][0]).copy()
    fsdp.register_comm_hook(wrapped, enabled=False)
    fsdp.apply_fsdp2(sharded, enabled=False)
    assert wrapped._comm_hook is None
    assert vars(fsdp._fsdp2_units(sharded)[1][0]) == comms
    assert serving_name() == "gloo"
    assert not fsdp.undo(wrapped)
    assert not fsdp.undo(sharded)

    # Stock collectives: a hook that does what torch does, and torch's own buffers.
    fsdp.register_comm_hook(wrapped, collectives="stock")
    fsdp.apply_fsdp2(sharded, collectives="stock")
    assert serving_name() == "gloo"
    assert deepytorch.report().decisions[-1]["reason"] == "collectives=stock"
    for model in (wrapped, sharded):
        model(torch.ones(2, 3)).sum().backward()
        assert fsdp.undo(model)
    assert not deepytorch.is_active()


def test_switched_off_and_with_stock_collectives() -> None:
    spawn_ranks(left_alone, 2, fresh=True)


def test_a_wrong_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "3.0.0")
    for apply in (fsdp.register_comm_hook, fsdp.apply_fsdp2):
        with pytest.raises(IntegrationError, match=r"torch 3\.0\.0 is not known .*>=2\.11"):
            apply(linear())


def test_without_a_process_group() -> None:
    with pytest.raises(IntegrationError, match="call init_process_group"):
        fsdp.apply_fsdp2(linear())
