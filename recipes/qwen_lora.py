# SPDX-License-Identifier: Apache-2.0
"""LoRA fine-tuning of a Qwen-class chat model, with its own chat template.

    torchrun --nproc-per-node 2 -m deepytorch.recipes.qwen_lora steps=40
    torchrun --nproc-per-node 8 -m deepytorch.recipes.qwen_lora \\
        model=Qwen/Qwen3-8B data=chats.jsonl precision=bf16 max_length=2048 merge_adapter=true

Without ``model=`` and ``data=`` it trains a small Qwen3 on the standard library's docstrings.
The loss is on what the assistant says and on the token that ends it, in every turn. The adapter is
saved in PEFT's format, and with ``merge_adapter=true`` the whole model as well. ``method=full``
trains all weights. Options: configs/qwen_lora.yaml.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from deepytorch.recipes.base.run import Process, console, together
from deepytorch.recipes.data.conversations import Conversation
from deepytorch.recipes.data.instructions import causal_loss, prepare_data
from deepytorch.recipes.data.settings import LoraOptions
from deepytorch.recipes.data.settings import QwenOptions as Config
from deepytorch.recipes.data.text import TextBatch, byte_tokenizer
from deepytorch.recipes.models.language import (
    load_model,
    load_tokenizer,
    print_sample,
    refuse_beyond_positions,
    save_checkpoint,
)
from deepytorch.recipes.runner.loop import run_recipe
from deepytorch.recipes.runner.memory import transformer_flops
from deepytorch.recipes.runner.task import Task

# Qwen's format of conversations, for the tokenizer of the small model.
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe: 0 done, 1 --compare found a difference, 2 bad options or data."""
    return run_recipe("qwen_lora", Config, prepare, argv)


def prepare(config: Config, process: Process) -> Task[TextBatch]:
    """The data, the model with its adapter, and the loss."""
    model = config.model
    tokenizer = together(lambda: load_tokenizer(model) if model else chat_tokenizer(), process)
    data = prepare_data(config, tokenizer, process)

    def make_model() -> Any:
        torch.manual_seed(config.seed)
        model = build_model(config, tokenizer)
        refuse_beyond_positions(model, data.longest)
        return model if config.method == "full" else with_adapter(model, config)

    def export(model: Any, run_dir: Path) -> None:
        save_trained(model, tokenizer, config, run_dir, sample=data.sample)

    return Task(
        make_model=make_model,
        make_loss=lambda model, ours: causal_loss(model, config.padding_free_of(ours)),
        batches=data.batches,
        balanced=data.balanced,
        repacked=config.padding_free_of(True) != config.padding_free_of(False),
        held_out=data.held_out,
        unit="tokens",
        learning_rate=default_rate(config),
        export=export,
        flops_of=transformer_flops,
    )


def default_rate(config: Config) -> float:
    """Adapters take larger steps than whole models, and models from scratch the largest."""
    if config.model is None:
        return 1e-2 if config.method == "lora" else 2e-3
    return 2e-4 if config.method == "lora" else 2e-5


def build_model(config: LoraOptions, tokenizer: Any) -> Any:
    """The checkpoint in ``config.model``, or a small Qwen3 with random weights."""
    # FSDP2 shards weights of one type only, and the adapter's are float32.
    frozen_in_bf16 = config.method == "lora" and config.precision in ("bf16", "fp8")
    frozen_in_bf16 = frozen_in_bf16 and config.engine != "fsdp2"
    dtype = torch.bfloat16 if frozen_in_bf16 else torch.float32
    if config.model:
        model = load_model(config.model, tokenizer, dtype)
    else:
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=config.hidden_size,
                intermediate_size=3 * config.hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_heads // 2 or 1,
                head_dim=config.hidden_size // config.num_heads,
                max_position_embeddings=config.max_length + config.sample_tokens,
                tie_word_embeddings=False,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
    return model.to(dtype)


def with_adapter(model: Any, config: LoraOptions) -> Any:
    """LoRA on all linear layers but the head; everything else is frozen."""
    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora)


def save_trained(
    model: Any, tokenizer: Any, config: LoraOptions, run_dir: Path, *, sample: Conversation
) -> None:
    """Write the adapter or the checkpoint, show an answer, and write what is merged."""
    folder = run_dir / ("checkpoint" if config.method == "full" else "adapter")
    save_checkpoint(model, tokenizer, folder)
    print_sample(model, tokenizer, sample, config.sample_tokens, run_dir / "sample.txt")
    console.print(f"{folder.name:<12}{folder}", highlight=False)
    if config.merge_adapter:
        save_checkpoint(model.merge_and_unload(), tokenizer, run_dir / "merged")
        console.print(f"merged      {run_dir / 'merged'}", highlight=False)


def chat_tokenizer() -> Any:
    """The byte tokenizer with Qwen's marks of turns; the one that ends a turn ends the answer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"}
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())
