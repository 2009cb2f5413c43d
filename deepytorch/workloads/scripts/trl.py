"""Register TRL's scripts, on Llamas of random weights and rows of chat data's lengths."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepytorch.workloads.scripts import text
from deepytorch.workloads.scripts.hugging_face import STEPS, save
from deepytorch.workloads.scripts.script import Peer, Prepare, Script, Size, TokenWork

_TRL = "f2cd57710ae345ea6428ae95363267fcf38a3dc8"
_Shape = dict[str, Any]
_1B: _Shape = {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000},
    **{"max_position_embeddings": 2048, "tie_word_embeddings": True},
}
# Llama 3 8B, as published.
_8B: _Shape = {
    **{"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
    **{"max_position_embeddings": 8192, "rope_theta": 500_000.0},
}
_SMALL: _Shape = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
    **{"max_position_embeddings": 2048, "tie_word_embeddings": True},
}


def _llama(folder: Path, shape: _Shape) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    made = text.tokenizer(folder, vocabulary=min(5_000, shape["vocab_size"]), longest=1024)
    config: Any = LlamaConfig(
        **shape,
        bos_token_id=made.bos_token_id,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
    )
    llama: Any = LlamaForCausalLM

    def build() -> Any:
        # A GPU draws billions of numbers in a second, a processor in a minute.
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return llama(config).to(torch.bfloat16)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        save(folder, build)
    finally:
        torch.set_default_dtype(before)
    gc.collect()
    torch.cuda.empty_cache()  # runs of the script need it


def _sft(shape: _Shape) -> Prepare:
    def prepare(folder: Path, size: Size) -> None:
        _llama(folder / "model", shape if size == "full" else _SMALL)
        rows, longest = (6_000, 1024) if size == "full" else (64, 32)
        (folder / "rows").mkdir()
        written = ({"text": sample} for sample in text.ragged(rows, longest))
        text.write_rows(folder / "rows" / "train.jsonl", written)

    return prepare


def _dpo(folder: Path, size: Size) -> None:
    _llama(folder / "model", _1B if size == "full" else _SMALL)
    rows, longest = (6_000, 400) if size == "full" else (64, 16)
    (folder / "rows").mkdir()
    three = (text.ragged(rows, longest, seed) for seed in range(3))
    written = (
        {"prompt": asked, "chosen": good, "rejected": bad}
        for asked, good, bad in zip(*three, strict=True)
    )
    text.write_rows(folder / "rows" / "train.jsonl", written)


def _work(shape: _Shape, *, rank: int = 0) -> TokenWork:
    """Count operations of full training or, with a rank, of LoRA on all linear layers.

    A weight takes part in two operations forwards, and in two for each gradient: its input's and,
    where it is trained, its own.
    """
    width, inner, layers = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    pairs = width * shape["num_key_value_heads"] // shape["num_attention_heads"]
    sides = ((width, width),) * 2 + ((width, pairs),) * 2 + ((width, inner),) * 3
    weights = layers * sum(a * b for a, b in sides) + shape["vocab_size"] * width
    adapters = layers * rank * sum(a + b for a, b in sides)
    of_token = 4 * weights + 6 * adapters if rank else 6 * weights
    return TokenWork(of_token=of_token, of_pair=6 * layers * width)


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


def _sft_row(name: str, *more: str, shape: _Shape, batch: int = 8) -> Script:
    path = "trl/scripts/sft.py"
    return _row(f"trl-sft-llama-{name}", path, _sft(shape), *more, batch=batch)


def _lora(rank: int) -> tuple[str, ...]:
    return ("--learning_rate=2.0e-4", "--use_peft", f"--lora_r={rank}", "--lora_alpha=16")


# Weights in bfloat16 and no recomputation, as the engines that it is compared with train it.
_PLAIN = ("--dtype=bfloat16", "--gradient_checkpointing=False")
_FULL = ("--learning_rate=2.0e-5",)
_ALL_LINEAR = ("--lora_target_modules=all-linear", "--lora_dropout=0.0")
_FLEX = "--attn_implementation=flex_attention"
# The fastest of TRL's own ways: packed rows, whose attention skips what other rows have.
_PACKED = Peer("TRL packed, flex attention", ("--packing=True", _FLEX))


def _accumulated(micro_batches: int) -> str:
    return f"--gradient_accumulation_steps={micro_batches}"


SCRIPTS = (
    replace(
        _sft_row("1b", *_FULL, *_PLAIN, shape=_1B),
        work=_work(_1B),
        peer=_PACKED,
    ),
    _sft_row("1b-defaults", *_FULL, shape=_1B),
    _sft_row("1b-lora", *_lora(32), *_PLAIN, shape=_1B),
    replace(
        _sft_row("1b-packing", *_FULL, "--packing=True", *_PLAIN, shape=_1B),
        work=_work(_1B),
        peer=Peer("TRL with flex attention", (_FLEX,)),
    ),
    replace(
        _sft_row("1b-accumulated", *_FULL, _accumulated(4), *_PLAIN, shape=_1B),
        work=_work(_1B),
        peer=_PACKED,
    ),
    replace(
        _sft_row("8b-lora", *_lora(16), *_ALL_LINEAR, _accumulated(8), *_PLAIN, shape=_8B, batch=4),
        work=_work(_8B, rank=16),
        peer=_PACKED,
    ),
    _row("trl-dpo-llama-1b", "trl/scripts/dpo.py", _dpo, "--learning_rate=5.0e-7", *_PLAIN),
)
