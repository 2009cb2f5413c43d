"""A compiled transformers model is saved as if nothing were compiled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import deepytorch
from deepytorch_core import compile as engine

pytestmark = [pytest.mark.usefixtures("quiet_profile"), pytest.mark.timeout(240)]


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )


def gpt2() -> Any:
    """Its head is tied to its embedding."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    )


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(6)
    for _ in range(3):
        ids = torch.randint(0, 37, (3, 11))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("build", [pytest.param(llama, marks=pytest.mark.extended), gpt2])
def test_compile_a_saved_model_is_read_by_plain_transformers(build: Any, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = build().train()
    never = copy.deepcopy(model)
    deepytorch.compile(model, "aot-eager")
    train(model)
    found = engine.compilation_of(model)
    assert found is not None
    assert [region.failure for region in found.regions] == [None]
    assert found.regions[0].told.chosen.get("aot-eager")
    model.save_pretrained(tmp_path / "ours")
    never.load_state_dict(model.state_dict())
    never.save_pretrained(tmp_path / "stock")
    ours, stock = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "stock")
    )
    assert list(ours) == list(stock)
    assert all(torch.equal(value, stock[name]) for name, value in ours.items())
    settings = [(tmp_path / folder / "config.json").read_text() for folder in ("ours", "stock")]
    assert settings[0] == settings[1]
    again, told = type(never).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    kept = again.state_dict()
    assert list(kept) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(kept[name], value), name
    assert not any("_compiled_call_impl" in vars(module) for module in again.modules())
    ids = torch.randint(0, 37, (2, 9))
    torch.testing.assert_close(again.eval()(ids).logits, model.eval()(ids).logits)
