"""A Trainer says how long its training is, so what is tried need not wait for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.c10d import activation
from deepytorch_core.compile import cost_model


def test_the_length_is_known_without_a_word_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    expect = engine.expect_steps

    def note(model: torch.nn.Module, steps: int) -> None:
        expect(model, steps)
        found: Any = engine.compilation_of(model)
        told.append((type(model).__name__, found.run_length.steps))

    monkeypatch.setattr(engine, "expect_steps", note)
    monkeypatch.setattr(config, "_current", Options())
    activation.leave_models_alone(False)
    deepytorch.activate(profile=str(tmp_path / "p"), log="error", padding_free="off", kernels="off")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 16
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    try:
        Trainer(model=model, args=arguments, train_dataset=rows).train()
    finally:
        deepytorch.deactivate()
        activation.leave_models_alone()
    assert told == [("LlamaForCausalLM", 6)]


def test_a_run_lasts_as_long_as_its_fastest_steps_say() -> None:
    length = cost_model.RunLength()
    length.steps = 1000
    length.note(10.0)
    assert length.lasts_s(12.0) == 2.0  # of one step nothing is known
    for now in (15.0, 15.5, 17.0):  # the first ones compile, load or warm up
        length.note(now)
    assert length.lasts_s(17.0) == 500.0
    length.steps = 4
    assert length.lasts_s(17.0) == 7.0
    length.steps = None
    assert length.lasts_s(17.0) == 7.0
