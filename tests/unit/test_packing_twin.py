"""Twins: small copies of models, on which it shows whether these pack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from deepytorch.integrations.padding_free import packing_twin
from deepytorch.integrations.padding_free.packed_forward import Conventions
from deepytorch.integrations.padding_free.packing_probe import Unsupported

pytestmark = pytest.mark.usefixtures("one_thread")


def examined(name: str, config: Any) -> Conventions:
    kind = getattr(hf, name)
    return packing_twin.examine(packing_twin.Twin(kind.__module__, name, config, frozenset(), None))


def test_a_twin_of_a_large_model_is_small_and_says_how_it_packs() -> None:
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    config = hf.LlamaConfig(**wide, num_attention_heads=64, num_key_value_heads=8)
    narrow = packing_twin._narrow(config)
    assert (narrow.num_hidden_layers, narrow.hidden_size, narrow.num_attention_heads) == (4, 64, 4)
    assert narrow.vocab_size == config.vocab_size, "every id is tried"
    assert config.num_hidden_layers == 80, "the model's own stays"
    found = examined("LlamaForCausalLM", config)
    assert found.shifted
    assert found.counts_items
    assert "position_ids" in found.per_token


def test_a_twin_has_a_layer_of_every_kind() -> None:
    kinds = ["sliding_attention"] * 7 + ["full_attention"] + ["sliding_attention"] * 4
    config = hf.Gemma3TextConfig(num_hidden_layers=12, layer_types=kinds)
    narrow = packing_twin._narrow(config)
    assert narrow.layer_types == kinds[:8]
    assert narrow.num_hidden_layers == 8


SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("RobertaForMaskedLM", hf.RobertaConfig),
        ("XLMRobertaForMaskedLM", hf.XLMRobertaConfig),
        ("CamembertForMaskedLM", hf.CamembertConfig),
        ("XmodForMaskedLM", hf.XmodConfig),
    ],
)
def test_positions_that_leave_out_the_padding_id_are_counted_so(name: str, kind: Any) -> None:
    more = {"languages": ["en_XX"], "default_language": "en_XX"} if "Xmod" in name else {}
    found = examined(name, kind(**SHAPE, pad_token_id=1, **more))
    assert (found.padding_id, found.first_position) == (1, 2)


@pytest.mark.parametrize("drops", [True, False])
def test_a_scale_by_the_number_of_masked_tokens_keeps_the_padding(drops: bool) -> None:
    config = hf.EsmConfig(**SHAPE, pad_token_id=1, mask_token_id=2, token_dropout=drops)
    if drops:
        with pytest.raises(Unsupported, match="some token ids have an effect on other tokens"):
            examined("EsmForMaskedLM", config)
    else:
        assert not examined("EsmForMaskedLM", config).shifted


REFUSED: dict[str, tuple[Callable[[], tuple[str, Any]], str]] = {
    "lengths": (
        lambda: (
            "LlamaForCausalLM",
            hf.LlamaConfig(
                **SHAPE,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
        ),
        "depends on the padded length",
    ),
    "state": (lambda: ("MambaForCausalLM", hf.MambaConfig(vocab_size=97)), "attention"),
    "two parts": (lambda: ("BartForConditionalGeneration", hf.BartConfig()), "encoder and a dec"),
    "no configuration": (lambda: ("LlamaForCausalLM", hf.BertConfig()), "no small copy"),
}


@pytest.mark.parametrize(("made", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_pack_says_why(made: Callable[[], tuple[str, Any]], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        examined(*made())


def test_token_types_that_say_who_sees_whom_are_not_packed() -> None:
    """Gemma's images see themselves both ways, by the types of their tokens."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 300, "num_hidden_layers": 2, "head_dim": 8}
    config = hf.Gemma3Config(
        text_config={**text, "num_key_value_heads": 2},
        vision_config={**sizes, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        image_token_index=299,
    )
    model = hf.Gemma3ForConditionalGeneration(config)
    twin = packing_twin.describe(model, model)
    try:
        found = packing_twin.examine(twin)
    except Unsupported:
        return
    assert "token_type_ids" not in found.per_token


def test_a_twin_is_made_where_the_model_has_no_weights_yet() -> None:
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE))
    assert packing_twin.examine(packing_twin.describe(model, model)).shifted
