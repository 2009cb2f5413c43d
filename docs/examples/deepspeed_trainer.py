"""The Trainer of transformers with DeepSpeed, configured by its JSON alone.

    torchrun --nproc-per-node 2 docs/examples/deepspeed_trainer.py \
        --deepspeed docs/examples/deepspeed_trainer_config.json

The section "deepytorch" of that JSON sends the collectives through deepytorch. By then the Trainer
has initialised torch.distributed: its process groups are upgraded where they are.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Sequences(torch.utils.data.Dataset):
    """Rows of a repeating count, which a language model learns in no time."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trainer and DeepSpeed")
    parser.add_argument("--deepspeed", required=True, help="DeepSpeed's configuration")
    parser.add_argument("--max_steps", type=int, default=20)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = TrainingArguments(
            output_dir=output_dir,
            deepspeed=given.deepspeed,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            max_steps=given.max_steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Sequences())
        trainer.train()
    if dist.get_rank() == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"losses {losses}, backend {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
