"""A rank whose labels are all ignored: losses and gradients of all ranks are what stock has."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import deepytorch
from deepytorch.integrations import accelerate as accelerate_adapter
from deepytorch.integrations import transformers as trainer_adapter
from deepytorch.integrations.kernels import causal_loss as causal_loss  # registers its kernels
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels
from deepytorch_core.testing import place, rank_store, spawn_ranks

# Ranks whose labels are all ignored, step by step.
IGNORED: list[set[int]] = [set(), {1}, {0, 1}, {0}]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
WAYS = ["packed", "chunked", "packed and chunked"]


def llama() -> Any:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=53,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(sizes).train()


def example(seed: int, *, is_ignored: bool) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(2, 19, (1,), generator=generator))
    ids = torch.randint(4, 53, (length,), generator=generator).tolist()
    return {"input_ids": ids, "labels": [-100] * length if is_ignored else [-100, *ids[1:]]}


def padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in examples)

    def rows(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in examples])

    ids, labels = rows("input_ids", 0), rows("labels", -100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def change(model: Any, way: str) -> None:
    """Do to the model what the way is called."""
    before = config.current()
    config.set_current(Options(profile=None, log="error"))
    try:
        if "chunked" in way:
            applied = apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), "on")
            assert "chunked" in applied.names.values()
        if "packed" in way:
            assert padding_free.attach(model, "on", adapter="test")
    finally:
        config.set_current(before)


def train(model: Any) -> list[tuple[float, list[torch.Tensor]]]:
    """Each step's loss and gradients; a rank's loss is the mean of its own targets."""
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    found = []
    for step, ignored in enumerate(IGNORED):
        seeds = range(100 * step + 10 * rank, 100 * step + 10 * rank + 3)
        batch = padded([example(seed, is_ignored=rank in ignored) for seed in seeds])
        loss = wrapped(**batch).loss
        loss.backward()
        found.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return found


def train_all_ways(rank: int, world_size: int) -> None:
    stock = llama()
    models = {way: copy.deepcopy(stock) for way in WAYS}
    expected = train(stock)
    # Stock's loss is no number where nothing is trained, its gradients are.
    assert [math.isnan(loss) for loss, _ in expected] == [rank in ranks for ranks in IGNORED]
    assert all(gradient.isfinite().all() for _, all_of in expected for gradient in all_of)
    for way, model in models.items():
        change(model, way)
        for step, (ours, theirs) in enumerate(zip(train(model), expected, strict=True)):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5, nan_ok=True), (way, step)
            for mine, other in zip(ours[1], theirs[1], strict=True):
                torch.testing.assert_close(mine, other, **CLOSE, msg=lambda m: f"{way}: {m}")  # noqa: B023


def test_labels_ignored_on_one_rank_give_the_mean_of_stocks_rank_means() -> None:
    spawn_ranks(train_all_ways, 2, backend="gloo")


class OneSided(torch.utils.data.Dataset[Any]):
    """Trains nothing on the second rank."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return example(index, is_ignored=dist.get_rank() == 1)


class Recording(Trainer):
    """Keeps the losses, unrounded, and the gradients that the optimizer gets."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        if self.accelerator.sync_gradients:
            gradients = [p.grad.clone() for p in self.model.parameters()]
            self.gradients = [*getattr(self, "gradients", []), gradients]
        return loss


class Ours(trainer_adapter.DeepytorchMixin, Recording):
    pass


def with_trainer(
    rank: int, world_size: int, choices: dict[str, str], folder: Path
) -> dict[str, Any]:
    deepytorch.deactivate()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    original = dist.init_process_group
    store = rank_store("ignored")
    dist.init_process_group = lambda backend, **_: original(
        backend, store=store, rank=place()[0], world_size=place()[1]
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    try:
        model = llama()
        trainer = Ours(
            model=model,
            args=arguments,
            train_dataset=OneSided(),
            data_collator=padded,
            deepytorch=choices,
        )
        trainer.train()
        return {"losses": trainer.losses, "gradients": trainer.gradients}
    finally:
        dist.init_process_group = original
        accelerate_adapter._uninstall()


def test_labels_ignored_on_one_rank_count_as_nothing_in_trainers_global_mean(
    tmp_path: Path,
) -> None:
    off = {"padding_free": "off", "kernels": "off"}
    stock = spawn_ranks(with_trainer, 2, off, tmp_path)
    assert stock[1]["losses"] == [0.0] * 6
    assert all(loss > 0 for loss in stock[0]["losses"])
    for choices in ({**off, "padding_free": "on"}, {**off, "kernels": "on"}):
        ours = spawn_ranks(with_trainer, 2, choices, tmp_path)
        for mine, theirs in zip(ours, stock, strict=True):
            assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
            for step, other in zip(mine["gradients"], theirs["gradients"], strict=True):
                for gradient, expected in zip(step, other, strict=True):
                    torch.testing.assert_close(gradient, expected, **CLOSE)
