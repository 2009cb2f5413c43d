"""Register TRL's scripts, on models of random weights and rows of chat data's lengths."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepytorch.workloads.scripts import text
from deepytorch.workloads.scripts.hugging_face import STEPS, save
from deepytorch.workloads.scripts.script import Peer, Prepare, Script, Size, TokenWork

_TRL = "f2cd57710ae345ea6428ae95363267fcf38a3dc8"
_Shape = dict[str, Any]


@dataclass(frozen=True)
class LanguageModel:
    """Describes a language model of transformers.

    Args:
        kind: its `model_type`.
        shape: fields of its configuration at size full, as published.
        small: fields of the configuration at size small that are not those of `_SMALL`.
    """

    kind: str
    shape: _Shape
    small: _Shape = field(default_factory=dict)

    def fields(self, size: Size) -> _Shape:
        """Return the fields of the configuration at this size."""
        return self.shape if size == "full" else {**_SMALL, **self.small}


_SMALL: _Shape = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
    **{"max_position_embeddings": 2048},
}
_LLAMA_1B = LanguageModel(
    "llama",
    {
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000},
        **{"max_position_embeddings": 2048, "tie_word_embeddings": True},
    },
    {"tie_word_embeddings": True},
)
_LLAMA_8B = LanguageModel(
    "llama",
    {
        **{"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
        **{"max_position_embeddings": 8192, "rope_theta": 500_000.0},
    },
)
_QWEN3_8B = LanguageModel(
    "qwen3",
    {
        **{"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        **{"vocab_size": 151_936, "max_position_embeddings": 40_960},
    },
    {"head_dim": 8},
)
_GEMMA3_4B = LanguageModel(
    "gemma3_text",
    {
        **{"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        **{"vocab_size": 262_208, "sliding_window": 1024},
    },
    {"head_dim": 8, "sliding_window": 16},
)
# Six of its 24 layers: an optimizer's states of all would not fit one GPU.
_GPT_OSS_20B = LanguageModel(
    "gpt_oss",
    {
        **{"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 6},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
        **{"num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201_088},
        "sliding_window": 128,
    },
    {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
)


def _build(folder: Path, fields: _Shape, kind: str) -> None:
    """Save a model of random weights in bfloat16, and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = text.tokenizer(folder, vocabulary=min(5_000, fields["vocab_size"]), longest=1024)
    named = {
        f"{name}_token_id": getattr(made, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    config: Any = AutoConfig.for_model(kind, **fields, **named)
    auto: Any = AutoModelForCausalLM

    def build() -> Any:
        # A GPU draws billions of numbers in a second, a processor in a minute.
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return auto.from_config(config, dtype=torch.bfloat16)

    save(folder, build)
    gc.collect()
    torch.cuda.empty_cache()  # runs of the script need it


def _sft(model: LanguageModel) -> Prepare:
    def prepare(folder: Path, size: Size) -> None:
        _build(folder / "model", model.fields(size), model.kind)
        rows, longest = (6_000, 1024) if size == "full" else (64, 32)
        (folder / "rows").mkdir()
        written = ({"text": sample} for sample in text.ragged(rows, longest))
        text.write_rows(folder / "rows" / "train.jsonl", written)

    return prepare


def _preferences(folder: Path, size: Size) -> None:
    """Make a model, and pairs of answers of which one is preferred."""
    _build(folder / "model", _LLAMA_1B.fields(size), _LLAMA_1B.kind)
    rows, longest = (6_000, 400) if size == "full" else (64, 16)
    (folder / "rows").mkdir()
    three = (text.ragged(rows, longest, seed) for seed in range(3))
    written = (
        {"prompt": asked, "chosen": good, "rejected": bad}
        for asked, good, bad in zip(*three, strict=True)
    )
    text.write_rows(folder / "rows" / "train.jsonl", written)


def work_of(model: LanguageModel, *, rank: int = 0) -> TokenWork:
    """Count operations of full training or, with a rank, of LoRA on all linear layers.

    A weight takes part in two operations forwards, and in two for each gradient: its input's and,
    where it is trained, its own. Attention counts as if it saw all tokens before; a token computes
    with the experts that it is sent to.
    """
    shape = model.shape
    width, inner, layers, heads = (
        shape[name]
        for name in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        )
    )
    head = shape.get("head_dim", width // heads)
    queries, pairs = heads * head, shape["num_key_value_heads"] * head
    sides = ((width, queries),) * 2 + ((width, pairs),) * 2
    sides += ((width, inner),) * (3 * shape.get("num_experts_per_tok", 1))
    weights = layers * sum(a * b for a, b in sides) + shape["vocab_size"] * width
    adapters = layers * rank * sum(a + b for a, b in sides)
    of_token = 4 * weights + 6 * adapters if rank else 6 * weights
    return TokenWork(of_token=of_token, of_pair=6 * layers * queries)


def _row(name: str, path: str, prepare: Prepare, *more: str, batch: int = 8) -> Script:
    both = ("--model_name_or_path={data}/model", "--dataset_name={data}/rows", *STEPS, *more)
    return Script(
        name=name,
        repository="huggingface/trl",
        commit=_TRL,
        path=path,
        arguments=(*both, f"--per_device_train_batch_size={batch}", "--bf16=True"),
        small=(
            *(*both, "--per_device_train_batch_size=2", "--use_cpu", "--bf16=False"),
            "--max_length=64",
        ),
        prepare=prepare,
        packages=("trl", "transformers", "datasets", *(["peft"] if "--use_peft" in more else [])),
        is_distributed=True,
    )


def _sft_row(name: str, model: LanguageModel, *more: str, batch: int = 8) -> Script:
    path = "trl/scripts/sft.py"
    return _row(f"trl-sft-{name}", path, _sft(model), *more, *_PLAIN, batch=batch)


def _preferred(trainer: str, *more: str) -> Script:
    name, path = f"trl-{trainer}-llama-1b", f"trl/scripts/{trainer}.py"
    return _row(name, path, _preferences, *more, *_PLAIN)


def _measured(
    script: Script, model: LanguageModel, *, rank: int = 0, peer: Peer | None = None
) -> Script:
    """Let the row tell rates, beside the fastest of TRL's own ways."""
    return replace(script, work=work_of(model, rank=rank), peer=peer or _PACKED)


def _lora(rank: int) -> tuple[str, ...]:
    return ("--learning_rate=2.0e-4", "--use_peft", f"--lora_r={rank}", "--lora_alpha=16")


def _accumulated(micro_batches: int) -> str:
    return f"--gradient_accumulation_steps={micro_batches}"


# Weights in bfloat16 and no recomputation, as the engines that it is compared with train it.
_PLAIN = ("--dtype=bfloat16", "--gradient_checkpointing=False")
_FULL = ("--learning_rate=2.0e-5",)
_ADAPTED = (*_lora(16), "--lora_target_modules=all-linear", "--lora_dropout=0.0", _accumulated(8))
_FLEX = "--attn_implementation=flex_attention"
# Rows are packed, and attention skips what other rows have.
_PACKED = Peer("TRL packed, flex attention", ("--packing=True", _FLEX))
_WITH_FLEX = Peer("TRL with flex attention", (_FLEX,))

SCRIPTS = (
    _measured(_sft_row("llama-1b", _LLAMA_1B, *_FULL), _LLAMA_1B),
    _row("trl-sft-llama-1b-defaults", "trl/scripts/sft.py", _sft(_LLAMA_1B), *_FULL),
    _sft_row("llama-1b-lora", _LLAMA_1B, *_lora(32)),
    _measured(
        _sft_row("llama-1b-packing", _LLAMA_1B, *_FULL, "--packing=True"),
        _LLAMA_1B,
        peer=_WITH_FLEX,
    ),
    _measured(_sft_row("llama-1b-accumulated", _LLAMA_1B, *_FULL, _accumulated(4)), _LLAMA_1B),
    _measured(_sft_row("llama-8b-lora", _LLAMA_8B, *_ADAPTED, batch=4), _LLAMA_8B, rank=16),
    _measured(_sft_row("qwen3-8b-lora", _QWEN3_8B, *_ADAPTED, batch=4), _QWEN3_8B, rank=16),
    _measured(_sft_row("gemma3-4b", _GEMMA3_4B, *_FULL), _GEMMA3_4B),
    _measured(_sft_row("gpt-oss-20b-6-layers", _GPT_OSS_20B, *_FULL), _GPT_OSS_20B),
    _preferred("dpo", "--learning_rate=5.0e-7"),
    _preferred("reward", "--learning_rate=1.0e-5"),
)
