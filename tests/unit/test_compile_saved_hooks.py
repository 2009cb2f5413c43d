"""Backward passes under hooks for saved tensors, and checkpointed: stock's, of any order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import deepytorch
from deepytorch_core import compile as engine

pytestmark = pytest.mark.usefixtures("own_profile", "one_thread")

EXTENDED = pytest.mark.extended

Around = Callable[[], contextlib.AbstractContextManager[Any]]


class Block(nn.Module):
    """Gives what it has computed in between besides, as a head for logging does."""

    def __init__(self, *, has_more: bool) -> None:
        super().__init__()
        self.a, self.b, self.has_more = nn.Linear(6, 6), nn.Linear(6, 6), has_more

    def forward(self, x: Tensor) -> Any:
        inner = torch.tanh(self.a(x))
        outer = x + torch.tanh(self.b(inner))
        return (outer, inner.square().sum(-1)) if self.has_more else outer


class Model(nn.Module):
    """Checkpoints its blocks if asked to."""

    def __init__(self, *, has_more: bool = False, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(has_more=has_more) for _ in range(3))
        self.has_more, self.is_checkpointed = has_more, is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        more = x.new_zeros(())
        for block in self.blocks:
            call = partial(checkpoint, block, use_reentrant=False)
            x = call(x) if self.is_checkpointed else block(x)
            if self.has_more:
                x, beside = x
                more = more + beside.mean()
        return x + more


def hooked() -> contextlib.AbstractContextManager[Any]:
    return saved_tensors_hooks(Tensor.clone, lambda saved: saved)


def trained(model: nn.Module, around: Around, differentiated: set[int], steps: int = 7) -> Any:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 6, requires_grad=True)
        with around():
            loss = model(x).square().mean()
            if step in differentiated:
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + slope.square().sum()
        loss.backward()
        assert x.grad is not None
        losses.append((loss.item(), x.grad.sum().item()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(model: Model, around: Around, differentiated: set[int]) -> engine.compilation.Compilation:
    ours = copy.deepcopy(model)
    deepytorch.compile(ours, "aot-eager")
    compilation = engine.compilation_of(ours)
    assert compilation is not None
    expected, found = (trained(network, around, differentiated) for network in (model, ours))
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4)
    return compilation


CASES = [
    pytest.param(hooked, {}, id="hooks"),
    pytest.param(contextlib.nullcontext, {"is_checkpointed": True}, id="checkpointed blocks"),
    pytest.param(save_on_cpu, {}, id="saved on the CPU", marks=EXTENDED),
    pytest.param(save_on_cpu, {"is_checkpointed": True}, id="both", marks=EXTENDED),
    pytest.param(hooked, {"has_more": True}, id="two outputs", marks=EXTENDED),
    pytest.param(
        contextlib.nullcontext,
        {"is_checkpointed": True, "has_more": True},
        id="checkpointed blocks of two outputs",
    ),
]


@pytest.mark.parametrize(("around", "kinds"), CASES)
def test_a_late_backward_pass_is_differentiated(around: Around, kinds: dict[str, bool]) -> None:
    compilation = check(Model(**kinds), around, {5})
    assert all(region.told.chosen.get("aot-eager") for region in compilation.regions)


@pytest.mark.parametrize(("around", "kinds"), CASES)
def test_every_backward_pass_is_differentiated(around: Around, kinds: dict[str, bool]) -> None:
    check(Model(**kinds), around, set(range(7)))
