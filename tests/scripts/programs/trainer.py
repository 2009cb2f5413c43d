"""transformers' Trainer on texts of several lengths."""

import sys

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
)


def collate(rows):
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Show(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}")


generator = torch.Generator().manual_seed(0)
lengths = torch.randint(3, 12, (24,), generator=generator).tolist()
rows = [torch.randint(1, 32, (length,), generator=generator).tolist() for length in lengths]
arguments = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "out",
    per_device_train_batch_size=4,
    max_steps=8,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=rows, data_collator=collate, callbacks=[Show()]).train()
