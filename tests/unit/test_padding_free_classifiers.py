"""Models with a head for each sequence train with a packed trunk as they do with padded batches.

In float64, as what the models compute in float32 would hide small leaks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor

from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import packed_attention, packing_watch
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from packing_tries import Inline, keep_float64, with_a_trace_of_others, without_a_boundary

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, WIDTH = 83, 24
CLOSE = 1e-10
SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_labels": 3},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _distilbert() -> Any:
    sizes = {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    none = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    return hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(**sizes, **none, pad_token_id=0, num_labels=3)
    )


def _gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2ForSequenceClassification(
        hf.GPT2Config(**sizes, **none, pad_token_id=0, num_labels=3)
    )


def _modernbert(**more: Any) -> Any:
    sizes = {**SHAPE, "local_attention": 8, "global_attn_every_n_layers": 2}
    return hf.ModernBertForSequenceClassification(
        hf.ModernBertConfig(**sizes, cls_token_id=1, sep_token_id=2, **more)
    )


# Those whose heads take the first token come first.
ALIGNED: dict[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SHAPE, **NO_DROPOUT)),
    "roberta": lambda: hf.RobertaForSequenceClassification(
        hf.RobertaConfig(**{**SHAPE, "pad_token_id": 1, "bos_token_id": 0}, **NO_DROPOUT)
    ),
    "distilbert": _distilbert,
    "electra": lambda: hf.ElectraForSequenceClassification(
        hf.ElectraConfig(**SHAPE, **NO_DROPOUT, embedding_size=32)
    ),
    "modernbert": _modernbert,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    **ALIGNED,
    "modernbert of means": lambda: _modernbert(classifier_pooling="mean"),
    "llama": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**GROUPED)),
    "qwen3": lambda: hf.Qwen3ForSequenceClassification(hf.Qwen3Config(**GROUPED, head_dim=8)),
    "gemma": lambda: hf.GemmaForSequenceClassification(
        hf.GemmaConfig(**{**GROUPED, "num_key_value_heads": 1}, head_dim=8)
    ),
    "mistral": lambda: hf.MistralForSequenceClassification(
        hf.MistralConfig(**GROUPED, sliding_window=6)
    ),
    "gpt2": _gpt2,
}
# The short run has one with a pooler, and one whose head takes the last token.
SHORT = ("bert", "llama")
EVERY = [
    name if name in SHORT else pytest.param(name, marks=pytest.mark.extended) for name in FAMILIES
]


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_float64(monkeypatch)


def made(name: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[name]().double().train()


def batch(model: Any, seed: int, *, is_left: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = 1 + seed % 6
    lengths = torch.randint(1, WIDTH, (rows,), generator=generator).tolist()
    padding, width = model.config.pad_token_id, max(lengths) + seed % 3
    ids = torch.full((rows, width), padding, dtype=torch.int64, device="cpu")
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if is_left else slice(0, length)
        ids[row, place] = torch.randint(4, VOCABULARY, (length,), generator=generator)
        mask[row, place] = 1
    labels = torch.randint(0, 3, (rows,), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Loss, logits and all gradients of one step."""
    model.zero_grad()
    output = model(**given)
    output.loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([each.detach().flatten() for each in (output.loss, output.logits, *found)])


def rows_of(model: Any) -> list[int]:
    """The number of rows that the trunk's first linear layer gets, from now on."""
    seen: list[int] = []

    def count(layer: torch.nn.Module, args: Any) -> None:
        seen.append(len(args[0]))

    count.__module__ = "deepytorch.tests"  # another's hook would keep the padding
    linear = (torch.nn.Linear, hf.pytorch_utils.Conv1D)
    layer = next(each for each in model.base_model.modules() if isinstance(each, linear))
    layer.register_forward_pre_hook(count)
    return seen


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", EVERY)
def test_steps_are_those_of_padded_batches(name: str) -> None:
    stock = made(name)
    model = copy.deepcopy(stock)
    rows = rows_of(model)
    assert padding_free.attach(model, "on", adapter="test")
    rows.clear()
    for seed in range(40 if name in SHORT else 200):
        is_left = seed % 4 == 3 and name not in ALIGNED
        given = batch(model, seed, is_left=is_left)
        apart = gradients(model, given) - gradients(stock, given)
        assert float(apart.abs().max()) <= CLOSE
    assert set(rows) == {1}
    assert padding_free.detach(model)
    given = batch(model, 5)
    assert torch.equal(gradients(model, given), gradients(stock, given))
    assert rows[-1] == 6


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.extended) for name in ALIGNED],
)
def test_batches_that_begin_late_stay_padded_where_the_first_token_is_taken(name: str) -> None:
    stock = made(name)
    model = copy.deepcopy(stock)
    rows = rows_of(model)
    assert padding_free.attach(model, "auto", adapter="test")
    rows.clear()
    given = batch(model, 5, is_left=True)
    assert torch.equal(gradients(model, given), gradients(stock, given))
    assert rows == [6]


@pytest.mark.usefixtures("in_float64")
def test_what_is_no_padding_behind_the_mask_keeps_a_batch_padded() -> None:
    stock = made("llama")
    model = copy.deepcopy(stock)
    rows = rows_of(model)
    assert padding_free.attach(model, "auto", adapter="test")
    rows.clear()
    given = batch(model, 5)
    given["input_ids"][given["attention_mask"] == 0] = 7  # the head takes the last such token
    assert torch.equal(gradients(model, given), gradients(stock, given))
    assert rows == [6]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", SHORT)
def test_who_calls_the_trunk_gets_what_it_gives_at_padding(name: str) -> None:
    stock = made(name)
    model = copy.deepcopy(stock)
    assert padding_free.attach(model, "auto", adapter="test")
    given = batch(model, 5)
    del given["labels"]
    found, expected = (each.base_model(**given).last_hidden_state for each in (model, stock))
    assert torch.equal(found, expected)
    given["output_hidden_states"] = True
    for mine, theirs in zip(
        model(**given).hidden_states, stock(**given).hidden_states, strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", SHORT)
def test_tuples_and_more_arguments_are_taken(name: str) -> None:
    stock = made(name)
    model = copy.deepcopy(stock)
    rows = rows_of(model)
    assert padding_free.attach(model, "auto", adapter="test")
    rows.clear()
    given: dict[str, Any] = batch(model, 5)
    given["position_ids"] = torch.arange(given["input_ids"].shape[1]).expand_as(given["input_ids"])
    if name == "bert":
        given["token_type_ids"] = (given["input_ids"] % 2) * given["attention_mask"]
    apart = gradients(model, given) - gradients(stock, given)
    assert float(apart.abs().max()) <= CLOSE
    loss, logits, *_ = model(**given, return_dict=False)
    theirs = stock(**given)
    torch.testing.assert_close((loss, logits), (theirs.loss, theirs.logits))
    assert set(rows) == {1}


@pytest.mark.usefixtures("in_float64")
def test_adapters_of_peft_train_with_a_packed_trunk() -> None:
    adapted = peft.get_peft_model(
        made("llama"), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"])
    ).double()
    stock = copy.deepcopy(adapted)
    assert padding_free.attach(adapted, "on", adapter="test")
    for seed in range(5):
        given = batch(adapted.get_base_model(), seed)
        apart = gradients(adapted, given) - gradients(stock, given)
        assert float(apart.abs().max()) <= CLOSE


@pytest.mark.parametrize("leak", [without_a_boundary, with_a_trace_of_others])
@pytest.mark.parametrize("name", EVERY)
def test_a_planted_leak_is_found(
    name: str, leak: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(name).float()
    stock = packed_attention.varlen_attention
    monkeypatch.setattr(packed_attention, "varlen_attention", leak(stock))
    assert not padding_free.attach(model, "auto", adapter="test")
    monkeypatch.setattr(packed_attention, "varlen_attention", stock)
    assert padding_free.attach(model, "auto", adapter="test")


@pytest.mark.parametrize("name", SHORT)
def test_who_asked_for_nothing_may_read_the_logits(
    name: str, monkeypatch: pytest.MonkeyPatch, own_profile: Path
) -> None:
    monkeypatch.setattr(packing_watch, "Helper", Inline)
    monkeypatch.setattr(decisions, "_made", [])
    config.set_current(Options(profile=str(own_profile), patience="off"))
    stock = made(name).float()
    model = copy.deepcopy(stock)
    rows = rows_of(model)
    padding_free.watch(model)
    for seed in range(5, 35, 6):
        given = batch(model, seed)
        found, expected = gradients(model, given), gradients(stock, given)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    (decision,) = [each for each in decisions.made() if each["what"] == "padding-free"]
    assert decision["chosen"] == "packed", decision["reason"]
    assert rows[0] == 6
    assert rows[-1] == 1
