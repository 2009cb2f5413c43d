"""Hooks by which transformers records outputs, put on by a pass that asks for one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.compile import module_state, recorders, regions

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "use_cache": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def experts() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, output_router_logits=True)
    return transformers.Qwen3MoeForCausalLM(config)


def batch(number: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1, 64, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def hooked(model: Any) -> Any:
    with torch.no_grad():
        model(**batch(), output_hidden_states=True)
    assert any(module_state.hooks_inside(model.model.layers[0]))
    return model


def test_they_count_only_where_they_collect() -> None:
    layer = hooked(llama()).model.layers[0]
    assert module_state.hooked(layer) is None
    assert module_state.hooked(layer, collected={"attentions"}) == "self_attn"
    layer.mlp.register_forward_hook(lambda *_: None)
    assert module_state.hooked(layer) == "mlp"


def test_they_are_set_aside_and_put_back_in_their_order() -> None:
    own: dict[int, Any] = {1: "first", 2: "second"}
    with recorders.set_aside([own]):
        assert not own
        own[3] = "put on meanwhile"
    assert list(own.items()) == [(1, "first"), (2, "second"), (3, "put on meanwhile")]


def test_blocks_are_compiled_beneath_them_and_run_eagerly_where_they_collect() -> None:
    stock = hooked(llama())
    model = copy.deepcopy(stock)
    deepytorch.compile(model, "aot-eager")
    for number in range(4):
        asks = {"output_hidden_states": number == 2}
        mine, other = (network(**batch(number), **asks) for network in (model, stock))
        torch.testing.assert_close(mine.loss, other.loss)
        if number == 2:
            assert len(mine.hidden_states) == len(other.hidden_states) == 4
            torch.testing.assert_close(mine.hidden_states[2], other.hidden_states[2])
        mine.loss.backward()
        other.loss.backward()
    (region,) = engine.compilation_of(model).regions  # type: ignore[union-attr]
    assert region.failure is None
    assert region.told.chosen["aot-eager"]
    for mine, other in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_what_stands_beside_a_recorded_router_is_compiled() -> None:
    stock = experts()
    stock(**batch())
    model = copy.deepcopy(stock)
    found = {region.name: len(region.modules) for region in regions.find(model)}
    assert found["model.layers.0.self_attn"] == 3
    assert "model.layers.0" not in found
    deepytorch.compile(model, "aot-eager")
    for number in range(3):
        mine, other = (network(**batch(number)) for network in (model, stock))
        torch.testing.assert_close(mine.loss, other.loss)
        torch.testing.assert_close(mine.router_logits, other.router_logits)
        mine.loss.backward()
        other.loss.backward()
    chosen = [region.told.chosen for region in engine.compilation_of(model).regions]  # type: ignore[union-attr]
    assert any("aot-eager" in policies for policies in chosen)
    for mine, other in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_trunk_has_most_modules_whatever_its_embedding() -> None:
    model = llama()
    assert regions.trunk(model) is model.model
    assert regions.trunk(model.model) is None
    assert regions.trunk(nn.Sequential(nn.Sequential(model))) is model.model
    assert regions.trunk(nn.Linear(2, 2)) is None


def test_hooks_that_ask_for_gradients_of_inputs_are_known() -> None:
    model = llama()
    assert module_state.hooked(model) is None
    model.enable_input_require_grads()
    assert module_state.hooked(model) == "model.embed_tokens"
    assert module_state.hooked(model, is_replayed=True) is None

    def make_inputs_require_grads(module: nn.Module, given: Any, output: Any) -> None:
        """Do what nobody knows, by the same name."""

    model.model.norm.register_forward_hook(make_inputs_require_grads)
    assert module_state.hooked(model, is_replayed=True) == "model.norm"
