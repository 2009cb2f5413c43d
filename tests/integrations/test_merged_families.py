"""Every family of models takes the same steps with shared, packed passes as with padded batches.

In float64, as what the models compute in float32 would hide small leaks: for this test it stays in
float64, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import Trainer, TrainingArguments

from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import merged_passes, packed_attention
from deepytorch.integrations.seams import arm as seams
from deepytorch.integrations.transformers import pack_batches
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.base.patching import Patches
from packing_tries import keep_float64, with_a_trace_of_others, without_a_boundary

VOCABULARY, NUM_ROWS, LARGE = 83, 29, 1 << 20
CLOSE = 1e-10
SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
# The products of groups of tokens have no float64.
EAGER = {"experts_implementation": "eager"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **EAGER}


def _distilbert() -> Any:
    sizes = {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    return hf.DistilBertForMaskedLM(
        hf.DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0, pad_token_id=0)
    )


def _gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "tied llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED, **SLIDING)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8)),
    "qwen3 moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=8)
    ),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=6)),
    "gemma": lambda: hf.GemmaForCausalLM(
        hf.GemmaConfig(**{**GROUPED, "num_key_value_heads": 1}, head_dim=8)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=8)
    ),
    "gpt neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE)),
    "gpt2": _gpt2,
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**GROUPED)),
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**GROUPED)),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**GROUPED)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**GROUPED, **EAGER, num_local_experts=4)
    ),
    "gpt oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **GROUPED,
            **EAGER,
            head_dim=8,
            sliding_window=6,
            num_local_experts=4,
            num_experts_per_tok=2,
            attn_implementation="eager",
        )
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SHAPE, **NO_DROPOUT)),
    "roberta": lambda: hf.RobertaForMaskedLM(
        hf.RobertaConfig(**{**SHAPE, "pad_token_id": 1, "bos_token_id": 0}, **NO_DROPOUT)
    ),
    "distilbert": _distilbert,
    "modernbert": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(**SHAPE, local_attention=8, global_attn_every_n_layers=2)
    ),
}
# The short run has one with rotary positions, and one that counts positions by tokens.
SHORT = ("qwen3", "roberta")


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(merged_passes, "WATCHED_STEPS", 0)
    patches = Patches()
    patches.replace(Trainer, "get_batch_samples", seams._gathering)
    yield
    patches.undo()


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_float64(monkeypatch)


def rows(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (NUM_ROWS,), generator=generator).tolist()
    return [
        torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


class Collator:
    """Pads, and leaves out the loss of some tokens; the ends of rows are of no interest.

    Args:
        padding: the id at padding.
        is_left: whether padding comes first.
    """

    def __init__(self, padding: int, *, is_left: bool) -> None:
        self.padding = padding
        self.is_left = is_left

    def __call__(self, features: list[list[int]]) -> dict[str, Tensor]:
        width = max(map(len, features))
        ids = torch.full((len(features), width), self.padding, dtype=torch.int64, device="cpu")
        mask = torch.zeros_like(ids)
        for number, row in enumerate(features):
            place = slice(width - len(row), width) if self.is_left else slice(0, len(row))
            ids[number, place] = torch.tensor(row, device="cpu")
            mask[number, place] = 1
        is_target = (mask == 1) & (ids % 3 != 0)
        if self.is_left:  # a row's first label follows padding: stock predicts it from there
            is_target[:, 1:] &= mask[:, :-1] == 1
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(is_target, -100)}


def trained(
    model: Any, folder: Path, accumulated: int, *, is_left: bool
) -> dict[str, list[Tensor] | list[float]]:
    """Train an epoch; returns each step's gradients, and the losses as logged."""
    found: dict[str, Any] = {"gradients": [], "losses": []}

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            gradients = [
                parameter.grad.flatten()
                for group in self.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            found["gradients"].append(torch.cat(gradients).clone())
            return super().step(closure)

    class Logged(hf.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            found["losses"] += [logs["loss"]] if logs and "loss" in logs else []

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulated,
        num_train_epochs=1,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    optimizer = Noting(model.parameters(), lr=0.05)
    Trainer(
        model=model,
        args=arguments,
        train_dataset=rows(accumulated),  # type: ignore[arg-type]
        data_collator=Collator(model.config.pad_token_id or 0, is_left=is_left),
        callbacks=[Logged()],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    ).train()
    return found


def same_steps(name: str, accumulated: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare the steps of an epoch; returns how many passes were shared."""
    torch.manual_seed(accumulated)
    stock = FAMILIES[name]().double().train()
    model = copy.deepcopy(stock)
    is_left = accumulated % 3 == 0
    monkeypatch.setattr(config, "_current", Options(tokens_per_step="off", log="error"))
    expected = trained(stock, folder, accumulated, is_left=is_left)
    # Every fourth with a budget that a step needs several passes for.
    budget = 60 if accumulated % 4 == 0 else LARGE
    monkeypatch.setattr(config, "_current", Options(tokens_per_step=budget, log="error"))
    assert pack_batches(model), name
    found = trained(model, folder, accumulated, is_left=is_left)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    for ours, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        apart = torch.linalg.norm(ours - theirs) / torch.linalg.norm(theirs)
        assert float(apart) <= CLOSE
    forward: Any = padding_free.forward_of(model)
    return 0 if forward.merged is None else forward.merged.num_shared


EVERY = [
    name if name in SHORT else pytest.param(name, marks=pytest.mark.extended) for name in FAMILIES
]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", EVERY)
def test_steps_of_every_family_are_the_padded_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 29 rows are 15 micro-batches of two, so most epochs end with a shorter step: 120 batches.
    lengths = (1, 2, 3, 4, 5, 6, 7, 8) if name not in SHORT else (3, 8)
    shared = [same_steps(name, accumulated, tmp_path, monkeypatch) for accumulated in lengths]
    assert all(
        number > 0 for number, accumulated in zip(shared, lengths, strict=True) if accumulated > 1
    )


@pytest.mark.parametrize("leak", [without_a_boundary, with_a_trace_of_others])
@pytest.mark.parametrize("name", EVERY)
def test_a_planted_leak_is_found_in_every_family(
    name: str, leak: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = FAMILIES[name]().train()
    stock = packed_attention.varlen_attention
    monkeypatch.setattr(packed_attention, "varlen_attention", leak(stock))
    assert not padding_free.attach(model, "auto", adapter="test")
    monkeypatch.setattr(packed_attention, "varlen_attention", stock)
    assert padding_free.attach(model, "auto", adapter="test")
