"""A Trainer on GPUs, tokens balanced and no padding computed: stock's losses, evener ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import needs_gpus, spawn_ranks

WORLD_SIZE = min(4, max(2, torch.cuda.device_count()))
STEPS, ACCUMULATION, BATCH = 6, 2, 3
pytestmark = [pytest.mark.gpu, needs_gpus(2), pytest.mark.timeout(600)]

STOCK = {"DEEPYTORCH_ENABLED": "0"}
EXACT = {"DEEPYTORCH_COMPILE": "off", "DEEPYTORCH_KERNELS": "off"}


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    rows = [sample["input_ids"] for sample in batch]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    mask = ids.ne(0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


def _run(rank: int, world_size: int, folder: str, ours: bool) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from deepytorch_core.base import decisions

    class Counting(Trainer):
        tokens: tuple[int, ...] = ()

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.tokens += (int((inputs["input_ids"] != 0).sum()),)
            return super().training_step(model, inputs, *args, **kwargs)

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            pad_token_id=0,
        )
    )
    chance = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 200, (STEPS * ACCUMULATION * BATCH * world_size,), generator=chance)
    data = [
        {"input_ids": torch.randint(1, 256, (int(length),), generator=chance)} for length in lengths
    ]
    trainer = Counting(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=STEPS,
            logging_steps=1,
            bf16=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=data,
        data_collator=padded,
    )
    if ours:
        from deepytorch.integrations.transformers import accelerate_trainer

        accelerate_trainer(trainer)
    trainer.train()
    steps = torch.tensor(trainer.tokens, device="cuda").view(STEPS, ACCUMULATION).sum(1)
    heaviest, total = steps.clone(), steps.clone()
    dist.all_reduce(heaviest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "heaviest": heaviest.tolist(),
        "total": total.tolist(),
        "decisions": {decision["what"]: decision["chosen"] for decision in decisions.made()},
    }


def test_balanced_and_unpadded_steps_have_stocks_losses(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"timeout_s": 200.0, "fresh": True}
    stock = spawn_ranks(_run, WORLD_SIZE, str(tmp_path), False, env=STOCK, **settings)[0]
    chosen = EXACT | {"DEEPYTORCH_TOKEN_BALANCE": "on", "DEEPYTORCH_PADDING_FREE": "on"}
    ours = spawn_ranks(_run, WORLD_SIZE, str(tmp_path), True, env=chosen, **settings)[0]
    assert ours["decisions"]["token balance"] == "on"
    assert len(ours["losses"]) == STEPS
    assert ours["losses"] == pytest.approx(stock["losses"], rel=3e-3)
    assert ours["total"] == stock["total"]
    assert sum(ours["heaviest"]) < sum(stock["heaviest"])
