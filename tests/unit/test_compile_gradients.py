"""Compiled regions where training asks more of gradients: passes twice, recomputed, with hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.compile import graphs, regions

pytestmark = pytest.mark.usefixtures("own_profile")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.outward = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(torch.relu(self.norm(self.inward(x))))


class Recomputed(nn.Module):
    """Checkpoints a part with dropout, after a graph break or without one."""

    def __init__(self, has_break: bool) -> None:
        super().__init__()
        self.inward = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
        self.has_break = has_break

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.inward(x))
        if self.has_break:
            torch._dynamo.graph_break()
        recomputed: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return recomputed


def blocks() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(4)])


def once(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def repeated(model: nn.Module, x: torch.Tensor) -> None:
    """Two losses of one output, each with its backward pass."""
    y = model(x)
    y[:, :4].square().mean().backward(retain_graph=True)
    y[:, 4:].abs().mean().backward()


def two_views(model: nn.Module, x: torch.Tensor) -> None:
    """Two forward passes before one backward pass."""
    (F.softplus(-model(x)).mean() + F.softplus(model(x.flip(1))).mean()).backward()


Step = Callable[[nn.Module, torch.Tensor], None]


def compare(ours: nn.Module, stock: nn.Module, step: Step, number: int) -> None:
    """One step of both: the same gradients and buffers."""
    for model in (ours, stock):
        torch.manual_seed(number)
        model.zero_grad()
        step(model, torch.randn(6, 8))
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for mine, theirs in zip(ours.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def compiled(stock: nn.Module) -> tuple[nn.Module, Any]:
    """A copy that is compiled at once, and its compilation."""
    model = deepytorch.compile(copy.deepcopy(stock), "aot-eager")
    return model, engine.compilation_of(model)


@pytest.mark.parametrize("is_at_once", [False, True])
def test_compile_backward_passes_may_be_repeated(is_at_once: bool) -> None:
    stock = blocks()
    model, compilation = compiled(stock)

    def restart(*_: object) -> None:
        if is_at_once and not compilation.regions[0]._at_once:
            compilation.regions[0].restart()

    model.register_forward_pre_hook(restart)
    for number, step in enumerate((once, repeated, repeated, once)):
        compare(model, stock, step, number)
    (region,) = compilation.regions
    assert region.failure is None
    assert region._at_once == is_at_once
    assert set(region.told.chosen) == {"aot-eager"}


def test_compile_two_forward_passes_before_a_backward_pass_across_a_switch() -> None:
    stock = Normed()
    model, compilation = compiled(stock)
    for number in range(3):
        compare(model, stock, two_views, number)
    (region,) = compilation.regions
    assert region.failure is None
    for number in range(4):  # as `auto` switches while it measures
        handle = model.register_forward_pre_hook(
            lambda *_: setattr(compilation, "is_on", not compilation.is_on)
        )
        compare(model, stock, two_views, number)
        handle.remove()
        compilation.is_on = number % 2 == 0
    assert set(region.told.chosen) == {"aot-eager"}


@pytest.mark.parametrize("has_break", [False, True])
def test_compile_leaves_checkpoints_inside_a_region_to_eager(
    has_break: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = Recomputed(has_break)
    model, compilation = compiled(stock)
    for number in range(4):
        compare(model, stock, once, number)
    assert "activation checkpointing" in compilation.regions[0].failure
    assert capsys.readouterr().err.count("runs eagerly: activation checkpointing") == 1


def test_compile_leaves_regions_with_hooks_inside_to_eager() -> None:
    stock = blocks()
    seen: list[object] = []
    stock[1].up.register_forward_hook(lambda _module, _args, y: seen.append(y) or y * 0.5)
    (region,) = regions.find(stock)
    assert region.modules == (stock[0], stock[2], stock[3])
    model, _ = compiled(stock)
    for number in range(4):
        compare(model, stock, once, number)
    assert len(seen) == 8


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_compile_notices_hooks_that_come_and_go(
    register: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = blocks()
    model, compilation = compiled(stock)
    compare(model, stock, once, 0)
    (region,) = compilation.regions
    assert region.failure is None
    seen: list[object] = []
    handles = [
        getattr(network[2].down, register)(lambda *a: seen.append(a)) for network in (model, stock)
    ]
    compare(model, stock, once, 1)
    assert len(seen) == 2
    for handle in handles:
        handle.remove()
    compare(model, stock, once, 2)
    assert len(seen) == 2
    assert "down" in region.failure
    assert capsys.readouterr().err.count("a hook was put on down inside") == 1


@pytest.mark.parametrize("fitting", [0, 1])
def test_compile_where_memory_is_for_a_step_alone(
    fitting: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stock, calls = graphs._Results.of, []

    def of(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return stock(*args)

    monkeypatch.setattr(graphs._Results, "of", of)
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Block() for _ in range(4)], nn.Dropout(0.5)), torch.randn(5, 8)
    twin = copy.deepcopy(model)
    deepytorch.compile(model, "inductor")
    for network in (model, twin):
        torch.manual_seed(3)
        network(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)
    said = capsys.readouterr().err
    assert said.count("runs eagerly: inductor: OutOfMemoryError: CUDA out of memory") == 1


class Amplifying(nn.Module):
    """Gradients of `x` are larger than float16's numbers on their way, those of `small` are small.

    `error` is that of the latter.
    """

    def __init__(self, dtype: torch.dtype, error: float = 0.0) -> None:
        super().__init__()
        self.dtype = dtype
        self.factor = 2**-8 * (1 + error)
        generator = torch.Generator().manual_seed(0)
        for name in ("first", "second"):
            weight = 30 * torch.randn(64, 64, generator=generator)
            self.register_buffer(name, weight.half().to(dtype))

    def forward(self, x: torch.Tensor, small: torch.Tensor) -> tuple[torch.Tensor]:
        y = (x.to(self.dtype) / 4096) @ self.first @ self.second
        return (y.half() + self.factor * (small - small.detach()),)


@pytest.mark.parametrize("error", [0.0, 0.07])
def test_compile_where_gradients_leave_float16(error: float) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(16, 64, generator=generator).half().requires_grad_() for _ in range(2)]
    (y,) = Amplifying(torch.float16)(*inputs)
    gradient, _ = torch.autograd.grad(y, inputs, graphs.seed(y, 0))
    assert not bool(gradient.isfinite().all()), "it does not try what it is for"

    settled: list[graphs.Settled] = []
    captured = torch.fx.symbolic_trace(Amplifying(torch.float16))
    wider = {"wider": Amplifying(torch.float32, error)}
    graph = graphs.Graph(
        captured,
        make=lambda: graphs.CompiledGraph(captured, wider, {}, frozenset([0])),
        note=lambda used: None,
        unusual=lambda is_unusual: None,
        tell=settled.append,
        failed=lambda error: None,
    )
    graph(*inputs)
    (found,) = settled
    if error:
        assert found.chosen == "eager"
        assert "gradient 1: differs by" in found.dropped["wider"]
    else:
        assert (found.chosen, found.dropped) == ("wider", {})
