"""Tests of fixes for passes that are to be replayed: the loss stays the same, nobody looks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deepytorch_core.compile import Fix, fixes, register_fix


class Looks(TorchFunctionMode):
    """Counts what would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += getattr(func, "__name__", "") in ("__bool__", "item")
        return func(*args, **(kwargs or {}))


def tiny_bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        f"{part}_{what}": value
        for part in ("encoder", "decoder")
        for what, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))
    }
    torch.manual_seed(0)
    config = BartConfig(vocab_size=19, d_model=8, max_position_embeddings=16, dropout=0.0, **sizes)
    return BartForConditionalGeneration(config).train()


def looked(forward: Any, **inputs: Tensor) -> tuple[int, float]:
    with Looks() as looks:
        loss = forward(**inputs).loss
    return looks.count, loss.item()


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_mask_of_ones_that_a_decoder_makes_is_not_looked_at(is_masked: bool) -> None:
    model = tiny_bart()
    ids = torch.randint(3, 19, (2, 7))
    inputs = {"input_ids": ids, "labels": ids}
    if is_masked:  # by the user, who may have left something out: it is applied
        inputs["decoder_attention_mask"] = torch.ones_like(ids)
    found, loss = looked(fixes.applied(model, model.forward), **inputs)
    stock, expected = looked(model.forward, **inputs)
    assert (found, stock) == (0, 1)
    assert loss == pytest.approx(expected, rel=1e-6)


def tiny_bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=19, intermediate_size=8, **sizes, **dropout)
    return BertForSequenceClassification(config).train()


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=19, intermediate_size=8, pad_token_id=0, **sizes)
    return LlamaForSequenceClassification(config).train()


@pytest.mark.parametrize("make", [tiny_bert, tiny_llama])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_padding_mask_is_applied_without_a_look(
    make: Any, is_padded: bool, is_wrapped: bool
) -> None:
    model = make()
    ids = torch.randint(3, 19, (3, 7))
    mask = torch.ones_like(ids)
    if is_padded:
        mask[0, 4:], mask[2, 1:] = 0, 0
        ids[mask == 0] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 1])}
    root = model
    if is_wrapped:
        root = torch.nn.Module()
        root.inner, root.forward = model, lambda **given: model(**given)
    stock, expected = looked(model.forward, **inputs)
    found, loss = looked(fixes.applied(root, root.forward), **inputs)
    assert stock > found == 0
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "whole"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_is_applied_without_a_look_whether_it_is_causal(kind: str, is_causal: bool) -> None:
    torch.manual_seed(0)
    sizes = {"nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
    model: Any = torch.nn.Transformer(8, num_encoder_layers=1, num_decoder_layers=1, **sizes)
    x, mask = torch.randn(2, 5, 8), torch.nn.Transformer.generate_square_subsequent_mask(5)
    if not is_causal:
        mask = mask.T.contiguous()
    inputs: tuple[Any, ...] = (x, x, mask, mask)
    if kind == "encoder":
        model, inputs = model.encoder, (x, mask)
    elif kind == "decoder":
        model, inputs = model.decoder, (x, x, mask)
    with Looks() as stock:
        expected = model(*inputs)
    with Looks() as ours:
        found = fixes.applied(model, model.forward)(*inputs)
    assert (ours.count, stock.count) == (0, 2 if kind == "whole" else 1)
    torch.testing.assert_close(found, expected)


def test_a_hint_that_a_mask_is_causal_is_followed() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 1)
    x, mask = torch.randn(5, 2, 8), torch.zeros(5, 5)  # the hint wins over it in torch
    expected = model(x, mask, is_causal=True)
    found = fixes.applied(model, model.forward)(x, mask, is_causal=True)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, model(x, mask))


def test_a_fix_of_ones_own_is_open_during_captured_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fixes.names()
    assert len(known) == 6
    monkeypatch.setattr(fixes, "_table", {})
    seen: list[Any] = []

    @contextlib.contextmanager
    def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        kwargs["bias"] = None
        seen.append(args)
        yield
        seen.append("closed")

    @register_fix
    class Own(Fix):
        name = "no bias"

        def around(self, model: torch.nn.Module) -> Any:
            return around if isinstance(model, torch.nn.Linear) else None

        @contextlib.contextmanager
        def during(self, model: torch.nn.Module) -> Iterator[None]:
            seen.append("capturing")
            yield
            seen.append("captured")

    other = torch.nn.ReLU()
    assert fixes.applied(other, other.forward) == other.forward
    x, weight = torch.ones(2), torch.ones(1, 2)
    found = fixes.applied(torch.nn.Linear(2, 1), torch.nn.functional.linear)(x, weight, bias=x)
    assert found.item() == 2
    assert seen == [(x, weight), "closed"]
    with fixes.during(other):
        assert seen[2:] == ["capturing"]
    assert seen[2:] == ["capturing", "captured"]
    with pytest.raises(ValueError, match="there is a fix 'no bias' already"):

        @register_fix
        class Another(Own):
            pass

    with pytest.raises(ValueError, match="can't name a fix"):
        register_fix(type("Nameless", (Own,), {"name": ""}))
