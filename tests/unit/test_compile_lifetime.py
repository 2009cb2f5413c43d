"""Compiled models go with their last user: no collection of cycles is needed, nor made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepytorch
from deepytorch_core import compile as engine

pytestmark = pytest.mark.usefixtures("own_profile", "one_thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.b(self.norm(self.a(x))))


class Heads(Block):
    def forward(self, x: Tensor) -> Any:
        inner = super().forward(x)
        return inner, self.b(inner)


class Hooked(Block):
    """A hook of its own leads back to a part of it."""

    def __init__(self) -> None:
        super().__init__()
        norm = self.norm
        self.register_forward_hook(lambda *_: norm.eps and None)


def stacked() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "make",
    [
        stacked,
        Heads,
        pytest.param(Block, marks=pytest.mark.extended),
        pytest.param(Hooked, marks=pytest.mark.extended),
        pytest.param(lambda: nn.BatchNorm1d(6), marks=pytest.mark.extended, id="only a norm"),
    ],
)
def test_a_compiled_model_goes_without_a_collection(make: Any, no_collection: None) -> None:
    model = make()
    deepytorch.compile(model, "aot-eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        found = model(torch.randn(4, 6))
        loss = (found[0] if isinstance(found, tuple) else found).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    compilation = engine.compilation_of(model)
    assert compilation is not None
    assert [region.told.chosen for region in compilation.regions] != [{}]
    left = {
        name: weakref.ref(part)
        for name, part in (*model.named_modules(), *model.named_parameters())
    }
    left["compilation"] = weakref.ref(compilation)
    left |= {
        f"region {place}": weakref.ref(region) for place, region in enumerate(compilation.regions)
    }
    del model, optimizer, found, loss, compilation
    gone = {name: reference() is None for name, reference in left.items()}
    assert all(gone.values()), [name for name, is_gone in gone.items() if not is_gone]


@pytest.mark.extended
def test_a_compiled_model_may_be_in_a_cycle_of_its_user() -> None:
    """The program's own cycles stay the collector's."""
    model = stacked()
    vars(model)["again"] = model
    deepytorch.compile(model, "aot-eager")
    for _ in range(2):
        model(torch.randn(4, 6)).sum().backward()
    left = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert not any(reference() for reference in left)
