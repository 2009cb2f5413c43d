"""TRL's SFTTrainer with passes that micro-batches share: losses and metrics stay stock's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import merged_passes
from deepytorch.integrations.seams import arm as seams
from deepytorch.integrations.transformers import pack_batches
from deepytorch.recipes.data.text import byte_tokenizer
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.base.patching import Patches


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    monkeypatch.setattr(merged_passes, "WATCHED_STEPS", 1)
    monkeypatch.setattr(config, "_current", Options(tokens_per_step=1 << 20, log="error"))
    patches = Patches()
    patches.replace(Trainer, "get_batch_samples", seams._gathering)
    yield
    patches.undo()


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.seen.append({name: value for name, value in logs.items() if value is not None})


def made() -> Any:
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            **shape,
            **heads,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def trained(model: Any, folder: Path, *, is_merged: bool, **more: Any) -> list[dict[str, float]]:
    rows = [{"text": "one two " * (1 + number % 5)} for number in range(24)]
    logs = Logs()
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=0.02,
            optim="sgd",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            max_length=64,
            **more,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=byte_tokenizer(),
        callbacks=[logs],
    )
    if is_merged:
        assert pack_batches(trainer.model, "on")
    trainer.train()
    forward = padding_free.forward_of(trainer.model)
    assert (forward is not None and forward.merged is not None) == is_merged
    if is_merged:
        assert forward is not None
        assert forward.merged is not None
        assert forward.merged.num_shared == 5  # of six steps: the first is watched
    return logs.seen


@pytest.mark.parametrize(
    ("loss", "checkpointed"),
    [
        ("nll", False),
        ("chunked_nll", True),
        pytest.param("nll", True, marks=pytest.mark.extended),
        pytest.param("chunked_nll", False, marks=pytest.mark.extended),
    ],
)
def test_trl_logs_what_stock_logs(loss: str, checkpointed: bool, tmp_path: Path) -> None:
    how = {"loss_type": loss, "gradient_checkpointing": checkpointed}
    model = made()
    expected = trained(copy.deepcopy(model), tmp_path, is_merged=False, **how)
    found = trained(model, tmp_path, is_merged=True, **how)
    names = {"loss", "grad_norm", "entropy", "num_tokens", "mean_token_accuracy"}
    assert names <= set(expected[0])
    for mine, theirs in zip(found, expected, strict=True):
        for name in names:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-5), name
