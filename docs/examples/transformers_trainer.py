"""Train a small causal language model with transformers' Trainer on deepytorch.

    deepytorch run --nproc-per-node 2 docs/examples/transformers_trainer.py --use_cpu

Every option of TrainingArguments is taken. Text, tokens and weights are made here, so nothing is
downloaded.
"""

import sys

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments

import deepytorch
from deepytorch.integrations.transformers import DeepytorchTrainer


class Sums(Dataset):
    """Sums of two numbers as text, a token for each byte; padded to 24 tokens."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first, second = index % 64, index // 64
        text = f"{first}+{second}={first + second}.".ljust(24)
        ids = torch.tensor(list(text.encode()))
        return {"input_ids": ids, "labels": torch.where(ids == ord(" "), -100, ids)}


def main() -> None:
    given = ["--output_dir", "runs/trainer", "--max_steps", "40", "--learning_rate", "1e-2"]
    given += ["--save_strategy", "no", "--report_to", "none", "--logging_steps", "10"]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        given + sys.argv[1:]
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
        )
    )
    trainer = DeepytorchTrainer(
        model=model,
        args=arguments,
        train_dataset=Sums(),
        deepytorch={"collectives": "auto"},
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(deepytorch.report())  # noqa: T201


if __name__ == "__main__":
    main()
