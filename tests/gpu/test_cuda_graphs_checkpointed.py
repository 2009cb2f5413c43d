"""Activation checkpointing under CUDA graphs: what is made again is replayed with the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from deepytorch_core.compile.capture import Capture
from deepytorch_core.testing import needs_gpus

pytestmark = [
    *(pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(300)),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated"),
]

DEVICE = "cuda"
STEPS = 12
AUTOCAST = True


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, **heads, **settings, vocab_size=301))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.to(DEVICE).train()


def trained(model: Any) -> list[float]:
    generator = torch.Generator(DEVICE).manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(5)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(3, 301, (4, 33), device=DEVICE, generator=generator)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=AUTOCAST):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_checkpointed_blocks_are_replayed() -> None:
    model = llama()
    expected = trained(copy.deepcopy(model))
    found = Capture(model, is_on=lambda: True)
    found.install()
    losses = trained(model)
    assert found.problem is None
    assert found.has_replays
    assert losses == pytest.approx(expected, rel=2e-3)


def test_checkpointed_blocks_that_draw_numbers_stay_launched() -> None:
    model = llama(attention_dropout=0.3)
    expected = trained(copy.deepcopy(model))
    found = Capture(model, is_on=lambda: True)
    found.install()
    losses = trained(model)
    assert not found.has_replays
    assert losses == pytest.approx(expected, rel=2e-3)
