# SPDX-License-Identifier: Apache-2.0
"""Full supervised fine-tuning of a Llama-class model.

    torchrun --nproc-per-node 2 -m deepytorch.recipes.llama_sft steps=40
    torchrun --nproc-per-node 2 -m deepytorch.recipes.llama_sft --compare
    torchrun --nproc-per-node 8 -m deepytorch.recipes.llama_sft \\
        model=meta-llama/Llama-3.2-1B data=alpaca.json precision=bf16 max_length=1024

Without ``model=`` and ``data=`` it trains a small Llama on the standard library's docstrings.
``--compare`` trains the stock stack and deepytorch side by side on the same data, seed and
initial weights. Options: configs/llama_sft.yaml. Read it from ``main`` downwards, copy, change.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deepytorch.recipes.base.run import Process, console, together
from deepytorch.recipes.data.instructions import causal_loss, prepare_data
from deepytorch.recipes.data.settings import LlamaOptions as Config
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

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "llama_sft.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe: 0 done, 1 --compare found a difference, 2 bad options or data."""
    return run_recipe("llama_sft", Config, prepare, argv)


def prepare(config: Config, process: Process) -> Task[TextBatch]:
    """The data, the model and the loss."""
    model = config.model
    tokenizer = together(lambda: load_tokenizer(model) if model else byte_tokenizer(), process)
    data = prepare_data(config, tokenizer, process)

    def make_model() -> Any:
        torch.manual_seed(config.seed)
        model = build_model(config, tokenizer)
        refuse_beyond_positions(model, data.longest)
        return model

    def export(model: Any, run_dir: Path) -> None:
        save_checkpoint(model, tokenizer, run_dir / "checkpoint")
        print_sample(model, tokenizer, data.sample, config.sample_tokens, run_dir / "sample.txt")
        console.print(f"checkpoint  {run_dir / 'checkpoint'}", highlight=False)

    return Task(
        make_model=make_model,
        make_loss=lambda model, ours: causal_loss(model, config.padding_free_of(ours)),
        batches=data.batches,
        balanced=data.balanced,
        repacked=config.padding_free_of(True) != config.padding_free_of(False),
        held_out=data.held_out,
        unit="tokens",
        # A model from scratch learns from large steps; a trained one forgets with them.
        learning_rate=2e-5 if config.model else 2e-3,
        export=export,
        flops_of=transformer_flops,
    )


def build_model(config: Config, tokenizer: Any) -> Any:
    """The checkpoint in ``config.model``, or a small Llama with random weights."""
    if config.model:
        return load_model(config.model, tokenizer)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.max_length + config.sample_tokens,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
