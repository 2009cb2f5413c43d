"""transformers' Trainer and TRL's SFTTrainer on deepytorch: the losses of stock training, undone."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import deepytorch
from deepytorch.integrations import _contract
from deepytorch.integrations import transformers as adapter
from deepytorch.recipes._data import byte_tokenizer
from deepytorch_core.testing import place, rank_store, spawn_ranks

STEPS = 20


@contextlib.contextmanager
def process_state() -> Iterator[None]:
    """Accelerate keeps its state in the process, and workers are used again."""
    deepytorch.deactivate()  # importing this module has activated it
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # The Trainer initialises by the environment, which knows no key space for each call.
    original = dist.init_process_group
    dist.init_process_group = lambda backend, **_: original(
        backend, store=rank_store("trainer"), rank=place()[0], world_size=place()[1]
    )
    try:
        yield
    finally:
        dist.init_process_group = original


class Recording:
    """Keeps the losses of a Trainer, unrounded."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


class PlainTrainer(Recording, Trainer):
    pass


class MixinTrainer(adapter.DeepytorchMixin, PlainTrainer):
    pass


class ReadyTrainer(Recording, adapter.DeepytorchTrainer):
    pass


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 99, (16,), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


def llama(vocabulary: int = 100) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
        )
    )


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **more: Any) -> Any:
    return kind(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_strategy="no",
        save_strategy=more.pop("save_strategy", "no"),
        report_to=[],
        disable_tqdm=True,
        seed=1,
        **more,
    )


def build(how: str, folder: Path, **more: Any) -> Any:
    given = {"model": llama(), "train_dataset": Tokens(), "args": arguments(folder, **more)}
    if how == "mixin":
        return MixinTrainer(**given, deepytorch={"compile": "off"})
    if how == "ready":
        return ReadyTrainer(**given)
    trainer = PlainTrainer(**given)
    return adapter.accelerate_trainer(trainer, compile="off") if how == "existing" else trainer


def native_ops() -> dict[str, int]:
    rows = [row for row in deepytorch.report().rows if row.algorithm != "delegate"]
    return {op: sum(row.calls for row in rows if row.op == op) for op in {row.op for row in rows}}


def train(rank: int, world_size: int, how: str, folder: Path) -> dict[str, Any]:
    with process_state():
        before = native_ops()
        trainer = build(how, folder)
        trainer.train()
        return {
            "losses": trainer.losses,
            "wrapped": type(trainer.model_wrapped).__name__,
            "native": {op: n - before.get(op, 0) for op, n in native_ops().items()},
            "options": deepytorch.report().options["compile"],
        }


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    results = spawn_ranks(train, 2, "stock", tmp_path_factory.mktemp("stock"))
    assert not any(sum(result["native"].values()) for result in results)
    assert all(len(result["losses"]) == STEPS for result in results)
    return [result["losses"] for result in results]


@pytest.mark.parametrize("how", ["mixin", "ready", "existing"])
def test_ddp_gives_the_losses_of_gloo_by_native_collectives(
    how: str, stock: list[list[float]], tmp_path: Path
) -> None:
    ours = spawn_ranks(train, 2, how, tmp_path)
    assert [result["losses"] for result in ours] == stock
    for result in ours:
        assert result["wrapped"] == "DistributedDataParallel"
        assert result["native"]["all_reduce"] >= STEPS
        assert result["options"] == ("auto" if how == "ready" else "off")


def resume(rank: int, world_size: int, how: str, folder: Path) -> list[float]:
    """Losses of the second half, from the checkpoint of the first."""
    with process_state():
        half = {"save_strategy": "steps", "save_steps": STEPS // 2}
        build(how, folder, **half).train()
        trainer = build(how, folder, **half)
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
        return trainer.losses


def test_a_checkpoint_is_saved_and_resumed(stock: list[list[float]], tmp_path: Path) -> None:
    for losses, whole in zip(spawn_ranks(resume, 2, "existing", tmp_path), stock, strict=True):
        assert losses == whole[STEPS // 2 :]
