"""Copies of a compiled model: those that nn.DataParallel makes, and those by copy.deepcopy."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.compile import regions, seam
from deepytorch_core.nn.swaps import _forward

X = torch.randn(3, 4)


def replica_of(module: nn.Module) -> nn.Module:
    """As `torch.nn.parallel.replicate` makes it, with zeros for weights."""
    made: nn.Module = module._replicate_for_data_parallel()  # type: ignore[operator]
    for name, parameter in module.named_parameters(recurse=False):
        setattr(made, name, torch.zeros_like(parameter))
    for name, child in module.named_children():
        made._modules[name] = replica_of(child)
    return made


class Steps:
    """A watcher that counts."""

    number = 0

    def on_forward(self, args: Any, kwargs: Any) -> None:
        self.number += 1

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.fixture
def compiled() -> Any:
    """A model after a step that has compiled it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    deepytorch.compile(model, "aot-eager")
    for _ in range(3):
        model(X).sum().backward()
    assert any("_compiled_call_impl" in vars(module) for module in model.modules())
    yield model
    engine.undo(model)


def test_a_replica_computes_with_its_own_weights(
    compiled: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    place = seam.opened(compiled)
    assert place is not None
    place.watcher = heard = Steps()
    replica = replica_of(compiled)
    assert replica(X).eq(0).all()
    assert not compiled(X).eq(0).all()
    assert heard.number == 1  # the copy's pass is no step
    assert "copies that nn.DataParallel makes run eagerly" in capsys.readouterr().err


def test_a_replica_of_a_swapped_module_does_too() -> None:
    module = nn.Linear(4, 4)
    undo = _forward.replace(module, lambda module, x: module.weight @ x.T)
    assert replica_of(module)(X).eq(0).all()
    assert module(X).shape == (4, 3)
    undo()


def test_what_a_script_has_put_on_a_module_stays_on_its_replica() -> None:
    module: Any = nn.Linear(4, 4)
    _forward.replace(nn.Linear(4, 4), lambda module, x: x)
    module.forward = lambda x: x + 1
    assert replica_of(module)(X).equal(X + 1)


def test_a_copy_of_a_compiled_model_can_be_compiled_too(compiled: nn.Module) -> None:
    copied = copy.deepcopy(compiled)
    found = [(region.name, len(region.modules)) for region in regions.find(copied)]
    engine.undo(compiled)
    assert found == [(region.name, len(region.modules)) for region in regions.find(compiled)]


def test_a_saved_model_needs_nothing_of_ours(compiled: nn.Module) -> None:
    fresh = nn.Sequential(nn.Linear(4, 4))
    deepytorch.compile(fresh)  # of which each pass is watched
    assert getattr(seam.of(fresh), "watcher", None)
    for model in (fresh, compiled):
        saved = pickle.dumps(model)
        assert b"deepytorch" not in saved
        loaded = pickle.loads(saved)
        assert loaded(X).equal(model(X))
    engine.undo(fresh)
