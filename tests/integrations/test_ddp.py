"""DDP on deepytorch: stock's losses, natively, in registered memory; refusals; and undone."""

from __future__ import annotations

import warnings
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import deepytorch
from deepytorch.integrations import ddp
from deepytorch.integrations.common.contract import IntegrationError
from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import assert_same_on_all_ranks, spawn_ranks

STEPS = 20
SMALL = {"bucket_cap_mb": 0.25}


def make_model(width: int = 129) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Linear(13, width), nn.GELU(), nn.Linear(width, 2 * width), nn.GELU()]
    return nn.Sequential(*layers, nn.BatchNorm1d(2 * width), nn.Linear(2 * width, 5))


def train(model: nn.Module, rank: int, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 13, generator=data)
        loss = (model(x) - x[:, :5]).square().mean()
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

    return _core.registered_memory()["in_use_bytes"]


def train_both(
    rank: int, world_size: int, kwargs: dict[str, Any]
) -> tuple[list[float], list[float], set[str], int]:
    stock_group()
    stock = train(DistributedDataParallel(make_model(), **kwargs), rank)
    model = ddp.prepare_ddp(make_model(), **kwargs)
    assert ddp.prepare_ddp(model) is model
    assert serving_name() == "deepytorch"
    ours = train(model, rank)
    native, placed = native_ops(), in_registered_memory()
    assert ddp.undo(model)
    assert not ddp.undo(model)
    assert (serving_name(), deepytorch.is_active()) == ("gloo", False)
    train(model, rank, 1)
    return stock, ours, native, placed


@pytest.mark.parametrize(
    ("kwargs", "world_size"),
    [
        (SMALL, 2),
        ({"static_graph": True, "gradient_as_bucket_view": True}, 3),
        ({"find_unused_parameters": True}, 2),
    ],
)
def test_losses_are_stocks(kwargs: dict[str, Any], world_size: int) -> None:
    size = 4 * sum(parameter.numel() for parameter in make_model().parameters())
    for stock, ours, native, placed in spawn_ranks(train_both, world_size, kwargs, fresh=True):
        assert ours == (stock if world_size == 2 else pytest.approx(stock, rel=1e-5))
        assert "all_reduce" in native
        assert placed >= size


def compressed(rank: int, world_size: int) -> tuple[list[float], list[float], set[str]]:
    stock_group()
    stock = train(DistributedDataParallel(make_model()), rank)
    model = ddp.prepare_ddp(make_model(), compress="bf16")
    ours, native = train(model, rank), native_ops()
    assert ddp.undo(model)
    assert not model._comm_hooks
    train(model, rank, 2)
    return stock, ours, native


def test_bf16_gradients_train_as_well() -> None:
    for stock, ours, native in spawn_ranks(compressed, 2, fresh=True):
        assert ours != stock
        assert ours == pytest.approx(stock, rel=0.03)
        assert "all_reduce" in native


def bf16_average(rank: int, world_size: int) -> None:
    model = ddp.prepare_ddp(nn.Linear(1000, 1, bias=False), compress="bf16")
    x = torch.randn(1, 1000, generator=torch.Generator().manual_seed(rank))
    model(x).sum().backward()
    inputs = [
        torch.randn(1, 1000, generator=torch.Generator().manual_seed(peer))
        for peer in range(world_size)
    ]
    sent = [(tensor / world_size).bfloat16().float() for tensor in inputs]
    total = sent[0]
    for tensor in sent[1:]:
        total = total + tensor
    assert torch.equal(model.module.weight.grad, total.bfloat16().float())
    sizes = {row.bytes / row.calls for row in deepytorch.report().rows if row.op == "all_reduce"}
    assert sizes == {2000}


def test_bf16_gradients_are_added_in_float32_and_rounded_once() -> None:
    spawn_ranks(bf16_average, 4, backend="deepytorch", fresh=True)


def bad(rank: int, world_size: int) -> list[str]:
    stock_group()
    wrapped = DistributedDataParallel(make_model())
    half = _MixedPrecision(param_dtype=torch.bfloat16)
    cases: list[tuple[Any, Any, tuple[dict[str, Any], ...]]] = [
        (ddp.prepare_ddp, wrapped, ({},)),
        (ddp.prepare_ddp, 3, ({},)),
        (ddp.prepare_ddp, make_model(), ({}, {"compress": "int8"})),
        (ddp.prepare_ddp, make_model(), ({"compress": "bf16"}, {})),
        (ddp.prepare_ddp, make_model(), ({"tune_buckets": "yes"},)),
        (ddp.prepare_ddp, make_model(), ({"find_unused_params": True},)),
        (ddp.prepare_ddp, make_model(), ({"collectives": "best"},)),
        (ddp.prepare_ddp, make_model(), ({"tune_buckets": True, "bucket_cap_mb_list": [1]},)),
        (ddp.prepare_ddp, make_model(), ({"compress": "bf16", "mixed_precision": half},)),
        (ddp.tune_buckets, make_model(), ({},)),
        (ddp.tune_buckets, DistributedDataParallel(make_model(), mixed_precision=half), ({},)),
        (ddp.tune_buckets, with_built_in_hook(), ({},)),
        (ddp.tune_buckets, with_a_new_head(), ({},)),
    ]
    said = []
    for apply, model, keywords in cases:
        with pytest.raises(IntegrationError) as error:
            apply(model, **keywords[min(rank, len(keywords) - 1)])
        said.append(str(error.value))
        assert (serving_name(), deepytorch.is_active()) == ("gloo", False)
    assert not ddp.undo(wrapped)
    return said


def with_built_in_hook() -> DistributedDataParallel:
    model = DistributedDataParallel(make_model())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model


def with_a_new_head() -> DistributedDataParallel:
    model = DistributedDataParallel(make_model())
    model.module[-1].weight = nn.Parameter(model.module[-1].weight.detach().clone())
    return model


def test_a_wrong_argument_is_one_line_on_every_rank() -> None:
    expected = [
        "the module is DistributedDataParallel's already: pass the one inside, or use tune_buckets",
        "int is no torch.nn.Module",
        "rank 1: prepare_ddp: compress='int8': expected one of None, 'bf16'",
        "rank 0 was given compress='bf16' and rank 1 compress=None: give every rank the same",
        "tune_buckets='yes': expected True or False",
        "unknown option 'find_unused_params'",
        "collectives='best': expected one of auto, native, stock",
        "bucket_cap_mb_list gives every bucket its size: leave it or tune_buckets away",
        "compress can't be used with this module: DDP's mixed_precision has",
        "Sequential is no DistributedDataParallel: pass what prepare_ddp returned",
        "this module's buckets can't be changed: DDP's mixed_precision has",
        "this module's buckets can't be changed: it has a communication hook that can't be told",
        "this module's buckets can't be changed: parameters were replaced since it was",
    ]
    for said in spawn_ranks(bad, 2, fresh=True):
        for message, part in zip(said, expected, strict=True):
            assert part in message
            assert "\n" not in message


def switched_off(rank: int, world_size: int) -> None:
    stock_group()
    model = ddp.prepare_ddp(make_model(), enabled=False, tune_buckets=True, compress="bf16")
    before = vars(model).keys()
    assert before == vars(DistributedDataParallel(make_model())).keys()
    ddp.tune_buckets(model, enabled=False)
    assert vars(model).keys() == before
    assert (model._comm_hooks, dict(model._forward_pre_hooks)) == ([], {})
    assert serving_name() == "gloo"
    assert not ddp.undo(model)

    # Stock collectives: the hook is there, the memory is torch's.
    model = ddp.prepare_ddp(make_model(), collectives="stock", compress="bf16")
    train(model, rank, 3)
    assert (serving_name(), in_registered_memory()) == ("gloo", 0)
    assert ddp.undo(model)


def test_switched_off_and_with_stock_collectives() -> None:
    spawn_ranks(switched_off, 2, fresh=True)


def on_a_mesh_and_a_group(rank: int, world_size: int) -> None:
    stock_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "other"))
    group = dist.new_group([0, 2]), dist.new_group([1, 3])
    for kwargs in (
        {"process_group": group[rank % 2]},
        {"device_mesh": mesh["replicate"]},
    ):
        model = ddp.prepare_ddp(make_model(), **kwargs)
        assert serving_name(model.process_group) == "deepytorch"
        train(model, rank // 2, 3)
        assert_same_on_all_ranks(model.module.state_dict()["0.weight"], str(list(kwargs)))
        assert ddp.undo(model)


def test_sub_groups_and_meshes_made_before_are_upgraded() -> None:
    spawn_ranks(on_a_mesh_and_a_group, 4, fresh=True)


def test_a_wrong_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "3.0.0")
    for apply in (ddp.prepare_ddp, ddp.tune_buckets):
        with pytest.raises(IntegrationError, match=r"torch 3\.0\.0 is not known .*>=2\.11"):
            apply(make_model())  # type: ignore[arg-type]
