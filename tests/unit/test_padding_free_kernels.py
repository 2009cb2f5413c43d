"""Models whose device turns out to have no kernel for their packed attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import packed_attention
from deepytorch_core.base import decisions
from deepytorch_core.base.errors import IntegrationError

SHAPE: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
}
WHY = "none was built"


def batch(*, is_labelled: bool) -> dict[str, Tensor]:
    ids = torch.randint(3, 61, (3, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [4], [6]])).long()
    ids = ids * mask
    labels = ids.masked_fill(mask == 0, -100) if is_labelled else torch.tensor([0, 1, 1])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("kind", [hf.LlamaForCausalLM, hf.LlamaForSequenceClassification])
def test_without_a_kernel_one_batch_is_packed_and_the_others_stay_padded(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "_made", [])
    torch.manual_seed(0)
    model = kind(hf.LlamaConfig(**SHAPE)).double().train()
    stock = copy.deepcopy(model)
    assert padding_free.attach(model, "auto", adapter="test")
    seen: list[int] = []

    def lacking(query: Tensor, **_: Any) -> str:
        seen.append(len(query))
        return WHY

    monkeypatch.setattr(packed_attention, "lacking", lacking)
    for _ in range(3):
        given = batch(is_labelled=kind is hf.LlamaForCausalLM)
        ours, expected = model(**given), stock(**given)
        torch.testing.assert_close(ours.loss, expected.loss, rtol=1e-6, atol=1e-6)
        ours.loss.backward()
        expected.loss.backward()
    assert len(seen) == SHAPE["num_hidden_layers"]
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-8)
    told = [(made["chosen"], made["reason"]) for made in decisions.made()]
    assert ("batch stays padded", WHY) in told


def test_who_insists_on_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).train()
    assert padding_free.attach(model, "on", adapter="test")
    monkeypatch.setattr(packed_attention, "lacking", lambda query, **_: WHY)
    model(**batch(is_labelled=True))
    with pytest.raises(IntegrationError, match=f"{WHY}; or set padding_free=auto or off"):
        model(**batch(is_labelled=True))


def test_a_model_that_is_tried_without_a_kernel_stays_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decisions, "_made", [])
    monkeypatch.setattr(packed_attention, "lacking", lambda query, **_: WHY)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).train()
    assert not padding_free.attach(model, "auto", adapter="test")
    assert any(WHY in made["reason"] for made in decisions.made())
