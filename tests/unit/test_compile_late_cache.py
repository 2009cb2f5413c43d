"""Compiled training passes fill no cache of keys and values; who uses one gets stock's."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import deepytorch

pytestmark = pytest.mark.usefixtures("one_thread", "own_profile")

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, **more)).train()


def bart() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
    inner = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = hf.BartConfig(vocab_size=61, **sizes, **inner, **heads)
    return hf.BartForConditionalGeneration(config).train()


def batch(step: int = 0, **more: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 61, (2, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids, **more}


def in_layers(model: Any) -> list[Any]:
    """Return what every layer gets as its cache, as they are called."""
    seen: list[Any] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2].isdecimal() and "encoder" not in name:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(kwargs.get("past_key_values")), with_kwargs=True
            )
    return seen


@pytest.mark.parametrize(
    ("make", "kind", "more"),
    [(llama, DynamicCache, {}), (bart, EncoderDecoderCache, {"labels": None})],
    ids=["llama", "bart"],
)
def test_compiled_passes_go_without_a_cache_that_is_there_when_used(
    make: Callable[[], Any], kind: type, more: dict[str, Any]
) -> None:
    stock, model = make(), make()
    deepytorch.compile(model, "aot-eager")
    seen = in_layers(model)
    for step in range(3):
        expected, output = (network(**batch(step, **more)) for network in (stock, model))
        assert list(output.keys()) == list(expected.keys())
        assert isinstance(output.past_key_values, kind)
        output.logits.sum().backward()
    assert len(set(map(id, seen[:2]))) == 1, "the first pass shows what stock returns"
    assert seen[2:] == [None] * 4
    assert output.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert type(output.past_key_values) is kind
    assert any(cache is not None for cache in seen)
    if kind is DynamicCache:
        ours, theirs = (result.past_key_values.layers[1].keys for result in (output, expected))
        torch.testing.assert_close(ours, theirs)
    # A script that uses it once may do so again: from now on it is filled.
    del seen[:]
    model(**batch(0, **more)).logits.sum().backward()
    assert None not in seen


USES: dict[str, Callable[[Any], Any]] = {
    "length": len,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "layers": lambda cache: [layer.keys.shape for layer in cache.layers],
    "method": lambda cache: cache.get_seq_length(),
}


def test_every_use_of_a_late_cache_finds_stocks() -> None:
    """Each cache is used for the first time, and all are made before that."""
    stock, model = llama(), llama()
    deepytorch.compile(model, "aot-eager")
    for network in (stock, model):
        network(**batch())
    seen = in_layers(model)
    caches = [[network(**batch()).past_key_values for _ in USES] for network in (stock, model)]
    assert seen == [None] * 2 * len(USES)
    for (name, use), theirs, ours in zip(USES.items(), *caches, strict=True):
        expected, found = use(theirs), use(ours)
        if isinstance(expected, DynamicCache):
            expected, found = (cache.get_seq_length() for cache in (expected, found))
        assert found == expected, name


@pytest.mark.extended
def test_a_second_segment_goes_on_from_a_late_cache() -> None:
    losses = []
    for ours in (False, True):
        model = llama()
        if ours:
            deepytorch.compile(model, "aot-eager")
        for step in range(3):
            ids = batch(step)["input_ids"]
            first = model(input_ids=ids[:, :5], labels=ids[:, :5])
            rest = ids[:, 5:]
            second = model(input_ids=rest, labels=rest, past_key_values=first.past_key_values)
            model.zero_grad()
            (first.loss + second.loss).backward()
            losses.append((first.loss + second.loss).item())
            losses.append(float(model.model.layers[0].self_attn.k_proj.weight.grad.norm()))
    assert losses[6:] == pytest.approx(losses[:6], rel=1e-4)


@pytest.mark.parametrize(
    "more", [{"use_cache": True}, {"return_dict": False}, {"past_key_values": DynamicCache()}]
)
def test_who_asks_for_a_cache_gets_it(more: dict[str, Any]) -> None:
    model = llama()
    deepytorch.compile(model, "aot-eager")
    model(**batch())
    seen = in_layers(model)
    output = model(**batch(), **more)
    assert None not in seen
    cache = output[2] if isinstance(output, tuple) else output.past_key_values
    assert type(cache) is DynamicCache


def test_a_model_that_returns_no_cache_for_labels_returns_none() -> None:
    stock, model = bart(), bart()
    deepytorch.compile(model, "aot-eager")
    for step in range(3):
        expected, output = (network(**batch(step)) for network in (stock, model))
        assert list(output.keys()) == list(expected.keys())


def test_layers_that_share_a_place_in_the_cache_keep_it() -> None:
    model = llama()
    model.model.layers[1] = model.model.layers[0]
    deepytorch.compile(model, "aot-eager")
    seen = in_layers(model)
    model(**batch())
    assert None not in seen


def test_a_model_that_waits_to_be_compiled_goes_with_its_last_user() -> None:
    gc.collect()
    gc.disable()
    try:
        model = llama()
        deepytorch.compile(model, is_patient=True)
        for step in range(2):
            model(**batch(step)).loss.backward()
        reference = weakref.ref(model)
        del model
        assert reference() is None
    finally:
        gc.enable()
