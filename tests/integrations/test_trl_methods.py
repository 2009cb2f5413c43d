"""TRL's trainers of every method give stock's losses with deepytorch's default options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from accelerate.state import AcceleratorState, GradientState
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainingArguments,
)

import deepytorch
from deepytorch.integrations import transformers as adapter
from deepytorch.recipes.data.text import byte_tokenizer

STEPS = 3
EXAMPLES = range(24)


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """Accelerate keeps its state in the process; tiny models are slower on several threads."""
    deepytorch.deactivate()  # importing the adapter has activated it
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shape(**more: Any) -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **more,
    }


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape()))


def qwen2() -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**shape()))


def judge() -> Any:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**shape(num_labels=1)))


def prompt(index: int) -> str:
    return "1" * (1 + index % 7) + " plus "


def texts(**columns: Callable[[int], Any]) -> Any:
    return datasets.Dataset.from_list(
        [{name: make(index) for name, make in columns.items()} for index in EXAMPLES]
    )


def answer(index: int) -> str:
    return "yes " * (1 + index % 5)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion)) % 5) for completion in completions]


def arguments(kind: type[TrainingArguments], folder: Path, **more: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    return kind(**{**given, **more})


def sft(folder: Path, model: Callable[[], Any]) -> Any:
    return trl.SFTTrainer(
        model(),
        args=arguments(trl.SFTConfig, folder),
        train_dataset=texts(prompt=prompt, completion=answer),
        processing_class=byte_tokenizer(),
    )


def dpo(folder: Path, model: Callable[[], Any]) -> Any:
    return trl.DPOTrainer(
        model(),
        ref_model=model(),
        args=arguments(trl.DPOConfig, folder),
        train_dataset=texts(prompt=prompt, chosen=answer, rejected=lambda _: "no"),
        processing_class=byte_tokenizer(),
    )


def kto(folder: Path, model: Callable[[], Any]) -> Any:
    return trl.KTOTrainer(
        model(),
        ref_model=model(),
        args=arguments(trl.KTOConfig, folder),
        train_dataset=texts(prompt=prompt, completion=answer, label=lambda index: index % 3 > 0),
        processing_class=byte_tokenizer(),
    )


def online(folder: Path, model: Callable[[], Any], trainer: Any, config: Any) -> Any:
    batch = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
    policy = model()
    policy.save_pretrained(folder)  # where the reference model comes from
    policy.config._name_or_path = str(folder)
    return trainer(
        policy,
        reward_funcs=reward,
        args=arguments(config, folder, beta=0.1, **batch),
        train_dataset=texts(prompt=prompt),
        processing_class=byte_tokenizer(),
    )


def grpo(folder: Path, model: Callable[[], Any]) -> Any:
    return online(folder, model, trl.GRPOTrainer, trl.GRPOConfig)


def rloo(folder: Path, model: Callable[[], Any]) -> Any:
    return online(folder, model, trl.RLOOTrainer, trl.RLOOConfig)


def rewards(folder: Path, model: Callable[[], Any]) -> Any:
    return trl.RewardTrainer(
        model(),
        args=arguments(trl.RewardConfig, folder),
        train_dataset=texts(
            chosen=lambda index: prompt(index) + answer(index),
            rejected=lambda index: prompt(index) + "no",
        ),
        processing_class=byte_tokenizer(),
    )


def count_rows(model: Any) -> set[int]:
    """Rows of the batches that the model's first layer gets in training, from now on."""
    seen: set[int] = set()

    def count(layer: torch.nn.Module, args: Any) -> None:
        if layer.training:
            seen.add(len(args[0]))

    count.__module__ = "deepytorch.tests"  # another's hook would keep the padding
    model.get_decoder().layers[0].register_forward_pre_hook(count)
    return seen


def figures(trainer: Any) -> list[dict[str, float]]:
    """Return what each step logs, but its time."""
    trainer.train()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    assert len(steps) == STEPS
    return [{name: v for name, v in line.items() if "time" not in name} for line in steps]


@pytest.mark.parametrize(
    ("method", "model", "is_packed"),
    [
        (sft, llama, True),
        (dpo, llama, True),
        pytest.param(dpo, qwen2, True, marks=pytest.mark.extended),
        (kto, llama, True),
        (grpo, llama, True),
        pytest.param(grpo, qwen2, True, marks=pytest.mark.extended),
        pytest.param(rloo, llama, True, marks=pytest.mark.extended),
        (rewards, judge, True),
    ],
)
def test_a_method_of_trl_gives_the_losses_of_stock(
    method: Callable[..., Any], model: Callable[[], Any], is_packed: bool, tmp_path: Path
) -> None:
    stock = figures(method(tmp_path, model))
    trainer = method(tmp_path, model)
    rows = count_rows(trainer.model)
    ours = figures(adapter.accelerate_trainer(trainer))
    for mine, theirs in zip(ours, stock, strict=True):
        names = set(theirs)
        if abs(theirs.get("rewards/margins", 1.0)) < 1e-6:
            # The policy is still its reference: which reward is the larger one is rounding.
            names.discard("rewards/accuracies")
        common = {name: mine[name] for name in names}
        assert common == pytest.approx({name: theirs[name] for name in names}, rel=1e-4, abs=1e-5)
    assert (1 in rows) == is_packed
