"""DDP on deepytorch: stock's losses, natively, in registered memory; bucket sizes; and undone."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deepytorch
from deepytorch.integrations import _bucket_tuning, _buckets, ddp
from deepytorch.integrations._buckets import MIB, Layout
from deepytorch_core.testing import assert_same_on_all_ranks, spawn_ranks

STEPS = 20
SMALL = {"bucket_cap_mb": 0.25}


def make_model(width: int = 129) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Linear(13, width), nn.GELU(), nn.Linear(width, 2 * width), nn.GELU()]
    return nn.Sequential(*layers, nn.BatchNorm1d(2 * width), nn.Linear(2 * width, 5))


def train(model: nn.Module, rank: int, steps: int = STEPS, *, accumulate: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(steps):
        x = torch.randn(6, 13, generator=data)
        last = (step + 1) % accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():  # type: ignore
            loss = (model(x) - x[:, :5]).square().mean()
            loss.backward()
        if last:
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
    assert dist.get_backend() == "deepytorch"
    ours = train(model, rank)
    native, placed = native_ops(), in_registered_memory()
    assert ddp.undo(model)
    assert not ddp.undo(model)
    assert (dist.get_backend(), deepytorch.is_active()) == ("gloo", False)
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
    ours = train(model, rank)
    native = {row.op: row.bytes / row.calls for row in deepytorch.report().rows}
    # One average alone: two roundings of bfloat16, whatever the number of ranks.
    model(torch.ones(2, 13)).sum().backward()
    local = make_model()
    local.load_state_dict(model.module.state_dict())
    assert ddp.undo(model)
    assert not model._comm_hooks
    train(model, rank, 2)
    return stock, ours, set(native)


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
    sent = [(one / world_size).bfloat16().float() for one in inputs]
    total = sent[0]
    for one in sent[1:]:
        total = total + one
    assert torch.equal(model.module.weight.grad, total.bfloat16().float())
    assert {row.op: row.bytes // row.calls for row in deepytorch.report().rows}


def test_bf16_gradients_are_added_in_float32_and_rounded_once() -> None:
    spawn_ranks(bf16_average, 4, backend="deepytorch", fresh=True)


# Bucket sizes on a live module.


def relaid(rank: int, world_size: int, kwargs: dict[str, Any], compress: bool) -> list[float]:
    """Trains with other bucket sizes every few steps; stock's losses when that is never done."""
    model = ddp.prepare_ddp(
        make_model(), compress="bf16" if compress else None, bucket_cap_mb=1, **kwargs
    )
    accumulate = 2 if kwargs.get("gradient_as_bucket_view") else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    losses, before = [], vars(model).copy()
    for step in range(STEPS):
        if world_size > 1 and step % 5 == 3:  # also between the steps of an accumulation
            size = 40_000 * (step // 5 + 1)
            _buckets.rebuild(model, Layout(size // 4, size))
            assert _buckets.layout_of(model) == Layout(size // 4, size)
        x = torch.randn(6, 13, generator=data)
        last = (step + 1) % accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = (model(x) - x[:, :5]).square().mean()
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(step % 3))
        losses.append(loss.item())
    assert vars(model).keys() == before.keys()
    return losses


def relaid_or_not(
    rank: int, world_size: int, kwargs: dict[str, Any], compress: bool
) -> tuple[list[float], list[float], int]:
    ours = relaid(rank, world_size, kwargs, compress)
    buckets = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    rebuild, _buckets.rebuild = _buckets.rebuild, lambda *_: None
    layout_of, _buckets.layout_of = _buckets.layout_of, lambda _: AnyLayout()
    try:
        return relaid(rank, world_size, kwargs, compress), ours, buckets
    finally:
        _buckets.rebuild, _buckets.layout_of = rebuild, layout_of


class AnyLayout:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize(
    ("kwargs", "compress"),
    [
        ({}, True),
        ({"gradient_as_bucket_view": True}, False),
        ({"static_graph": True}, False),
        ({"find_unused_parameters": True}, False),
    ],
)
def test_bucket_sizes_change_between_steps_and_nothing_else(
    kwargs: dict[str, Any], compress: bool
) -> None:
    results = spawn_ranks(relaid_or_not, 2, kwargs, compress, backend="deepytorch", fresh=True)
    for stock, ours, first_bytes in results:
        assert ours == stock
        assert first_bytes == MIB


def tune(rank: int, world_size: int, quick: int | None) -> Any:
    stock = train(make_ddp(), rank, 60)
    model = make_ddp()
    base = _buckets.layout_of(model)
    layouts = [Layout(60_000, 60_000), Layout(10_000, 200_000)]
    _bucket_tuning.candidates = lambda *_: layouts  # type: ignore[assignment]
    clock = FakeClock(model, None if quick is None else layouts[quick])
    _bucket_tuning.time = clock  # type: ignore[assignment]
    ddp.tune_buckets(model, tune="force")
    ddp.tune_buckets(model, tune="force")
    assert len(model._forward_pre_hooks) == 1
    copied = copy.deepcopy(model.module)
    assert copied is not model.module
    steps = 3 * 8 + (16 if quick is not None else 0)
    ours = train(model, rank, steps + 1)
    assert not model._forward_pre_hooks
    chosen = _buckets.layout_of(model)
    assert_same_on_all_ranks(str(chosen), "chosen")
    assert ours == stock[: steps + 1]
    (decision,) = deepytorch.report().decisions
    assert ddp.undo(model)
    assert _buckets.layout_of(model) == base
    train(model, rank, 2)
    return base, chosen, decision, str(deepytorch.report())


def make_ddp() -> DistributedDataParallel:
    return DistributedDataParallel(make_model(), bucket_cap_mb=0.5, gradient_as_bucket_view=True)


class FakeClock:
    """Time stands still between steps of the quick layout, and goes on a second in the others."""

    def __init__(self, model: Any, quick: Layout | None) -> None:
        self._model, self._quick, self._now = model, quick, 0.0

    def perf_counter(self) -> float:
        is_quick = _buckets.layout_of(self._model) == self._quick
        self._now += 0.4 if is_quick else 0.5
        return self._now


@pytest.mark.parametrize("quick", [None, 0, 1])
def test_the_faster_sizes_stay_and_no_others(quick: int | None) -> None:
    results = spawn_ranks(tune, 2, quick, backend="deepytorch", fresh=True)
    for base, chosen, decision, report in results:
        assert (chosen == base) == (quick is None)
        assert (decision["what"], decision["chosen"]) == ("DDP buckets", str(chosen))
        assert len(decision["times_ms"]) == 3
        assert f"decision: DDP buckets: {chosen}, " in report
