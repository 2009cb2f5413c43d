"""A model's parts that are kept: each function gives what stock gives, whatever is done to it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from deepytorch.integrations.seams import known_parts
from deepytorch_core.base.patching import Patches
from deepytorch_core.compile import seam

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture(autouse=True)
def _in_place() -> Iterator[None]:
    patches = Patches()
    known_parts.of_models(hf.modeling_utils, patches)
    known_parts.of_modules(nn.modules.module, patches)
    known_parts.of_trainer(hf.trainer, patches)
    yield
    patches.undo()


def made(*, taken: bool = True) -> Any:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).train()
    if taken:
        assert seam.opened(model) is not None
    return model


def used(model: Any) -> Any:
    """All functions once, so that the parts are known; stock goes through no module any more."""
    model.train()
    model.zero_grad()
    model.num_parameters(exclude_embeddings=True)
    found = seam.of(model)
    assert found is not None
    assert found.parts is not None
    return model


def figures(model: Any) -> list[Any]:
    """Return all that the functions return and leave."""
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number % 3))
    found: list[Any] = [model.num_parameters(exclude_embeddings=bool(way)) for way in (0, 1)]
    found.append(float(trainer_of(model)._clip_grad_norm(model)))
    found.append([float(weight.grad.abs().sum()) for weight in model.parameters()])
    assert model.train() is model
    found.append([module.training for module in model.modules()])
    model.zero_grad()
    found.append([weight.grad is None for weight in model.parameters()])
    return found


def trainer_of(model: Any) -> Any:
    class Asked:
        """The part of a Trainer that clips."""

        _clip_grad_norm = hf.Trainer._clip_grad_norm

        def __init__(self) -> None:
            self.args = hf.TrainingArguments(output_dir="unused", report_to=[], use_cpu=True)
            self.accelerator: Any = self

        def _has_mixed_mesh_grads(self, model: Any) -> bool:
            return any(parameter is None for parameter in model.parameters())

        def clip_grad_norm_(self, parameters: Any, most: float) -> Any:
            return torch.nn.utils.clip_grad_norm_(parameters, most)

    return Asked()


def add(model: Any) -> None:
    model.extra = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()


def add_below(model: Any) -> None:
    model.model.layers[1].mlp.extra = nn.Linear(3, 3, bias=False).eval()


def take_out(model: Any) -> None:
    del model.model.layers[0]


def replace(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.ones(24, 16))


def replace_all(model: Any) -> None:
    vars(model.model)["_modules"] = dict(model.model._modules, other=nn.Linear(2, 2).eval())


def resize(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.data = torch.ones(30, 16)


def evaluate(model: Any) -> None:
    model.model.layers[0].eval()


def untie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


CHANGES = (add, add_below, take_out, replace, replace_all, resize, evaluate, untie)


@pytest.mark.parametrize("change", [lambda model: None, *CHANGES])
def test_everything_is_as_stock_has_it(change: Callable[[Any], None]) -> None:
    model, stock = used(made()), made(taken=False)
    assert figures(model) == figures(stock)
    for network in (model, stock):
        change(network)
    assert figures(model) == figures(stock)
    for network in (model, stock):
        network.eval()
    assert figures(model) == figures(stock)


def test_nobody_goes_through_the_modules_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = used(made())
    trainer = trainer_of(model)
    walks: list[Any] = []
    walk = nn.Module.named_modules

    def named_modules(self: Any, *args: Any, **kwargs: Any) -> Any:
        walks.append(self)
        return walk(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", named_modules)
    seam.of(model).parts = None  # type: ignore[union-attr]
    used(model)
    walks.clear()
    for _ in range(3):
        used(model)
        trainer._clip_grad_norm(model)
    assert walks == []


def test_a_model_with_ways_of_its_own_is_left_to_them() -> None:
    class Own(hf.LlamaForCausalLM):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([self.lm_head.weight])

    class Frozen(nn.Linear):
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    own = Own(hf.LlamaConfig(**SHAPE))
    assert seam.opened(own) is not None
    for parameter in nn.Module.parameters(own):
        parameter.grad = torch.ones_like(parameter)
    own.zero_grad()
    assert sum(weight.grad is None for weight in nn.Module.parameters(own)) == 1

    model = used(made())
    model.frozen = Frozen(2, 2)
    for _ in range(2):
        model.frozen.training = True
        model.train()
        assert not model.frozen.training


def test_a_model_dies_when_it_is_let_go_of() -> None:
    model = used(made())
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_a_copy_has_parts_of_its_own() -> None:
    model = used(made())
    twin = copy.deepcopy(model)
    assert figures(twin) == figures(made(taken=False))
    assert figures(model) == figures(made(taken=False))


class Outer(nn.Module):
    """Wraps a model, as peft does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"model": model})


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_a_model_that_another_wraps_is_known_with_that_one(
    change: Callable[[Any], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(taken=False)
    outer = Outer(model)
    assert seam.opened(outer) is not None
    assert figures(model) == figures(made(taken=False))
    outer.zero_grad()
    assert figures(model) == figures(made(taken=False))
    assert seam.of(model) is None
    if change is not None:
        other = made(taken=False)
        for each in (model, other):
            change(each)
        assert figures(model) == figures(other)
        return
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "children", None)
        assert model.train() is model
        assert model.num_parameters(exclude_embeddings=True)


def test_what_changes_again_and_again_is_gone_through_as_before() -> None:
    model = used(made())
    for number in range(2 * known_parts._MOST_CHANGES):
        model.add_module(f"more{number}", nn.Linear(1, 1))
        assert model.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    found = seam.of(model)
    assert found is not None
    parts: Any = found.parts
    assert set(parts.num_changes.values()) == {known_parts._MOST_CHANGES}
