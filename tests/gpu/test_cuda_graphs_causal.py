"""Causal models of transformers, called without a mask and replayed: they train as stock does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from deepytorch_core.compile import capture, late_cache, seam
from deepytorch_core.compile.capture import Capture
from deepytorch_core.testing import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(300)]

DEVICE = "cuda"
STEPS = 12
VOCABULARY = 131


def made(family: str, **more: Any) -> Any:
    import transformers

    names = {"GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0}}
    usual = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0} if family == "GPT2" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, **names.get(family, usual), **dropout, **more
    )
    name = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    torch.manual_seed(0)
    return getattr(transformers, name)(config).to(DEVICE).train()


def train(model: Any, **more: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, VOCABULARY, (3, 24), generator=generator).to(DEVICE)
        loss = model(input_ids=ids, labels=ids.clone(), **more).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", ["Llama", "GPT2", "GPTNeoX"])
def test_positions_that_a_model_counts_itself_are_not_waited_for(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import masking_utils

    model = made(family, use_cache=False)
    stock = copy.deepcopy(model)
    looks: list[Any] = []
    look = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", lambda ids: (looks.append(ids), look(ids))[1]
    )
    found = Capture(model, is_on=lambda: True)
    found.install()
    losses = train(model)
    assert found.problem is None
    assert found.num_captured == 1
    # As it came while it was watched, and to know what is expected of a replay it need not look.
    assert len(looks) == capture.WATCHED_CALLS
    assert losses == pytest.approx(train(stock), rel=1e-4)


def test_a_cache_that_nobody_asks_for_is_made_when_it_is_used() -> None:
    model = made("Llama")
    stock = copy.deepcopy(model)
    found = Capture(model, is_on=lambda: True)
    found.install()
    own = seam.of(model)
    assert own is not None
    own.around = late_cache.of(model, is_on=lambda: True, switch=lambda _: True)
    assert train(model) == pytest.approx(train(stock), rel=1e-4)
    assert found.problem is None
    ids = torch.randint(3, VOCABULARY, (3, 24)).to(DEVICE)
    assert model(input_ids=ids, labels=ids, use_cache=True).past_key_values is not None
    loss, logits, cache = model(input_ids=ids, labels=ids, return_dict=False)
    assert (loss.dim(), logits.dim(), type(cache).__name__) == (0, 3, "DynamicCache")
    assert model(input_ids=ids, labels=ids).past_key_values.get_seq_length() == 24


def test_packed_rows_of_the_users_stay_apart() -> None:
    model = made("Llama", use_cache=False)
    stock = copy.deepcopy(model)
    positions = torch.cat([torch.arange(9), torch.arange(15)]).expand(3, 24).to(DEVICE)
    Capture(model, is_on=lambda: True).install()
    losses = train(model, position_ids=positions)
    assert losses == pytest.approx(train(stock, position_ids=positions), rel=1e-4)
    assert losses != pytest.approx(train(made("Llama", use_cache=False)), rel=1e-4)
