"""The Trainer's FSDP2 and DeepSpeed modes on deepytorch, against stock gloo, on CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import deepytorch
from deepytorch.integrations import transformers as adapter
from deepytorch_core.testing import place, rank_store, spawn_ranks

STEPS = 20


@contextlib.contextmanager
def process_state() -> Iterator[None]:
    """Accelerate keeps its state in the process, and workers are used again."""
    deepytorch.deactivate()  # importing this module has activated it
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    original = dist.init_process_group
    dist.init_process_group = lambda backend=None, **_: original(
        backend, store=rank_store("trainer"), rank=place()[0], world_size=place()[1]
    )
    before = dict(os.environ)  # noqa: TID251  Accelerate's plugins set variables
    try:
        yield
    finally:
        os.environ.clear()  # noqa: TID251
        os.environ.update(before)  # noqa: TID251
        dist.init_process_group = original


class PlainTrainer(Trainer):
    """Keeps the losses, unrounded."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


class MixinTrainer(adapter.DeepytorchMixin, PlainTrainer):
    pass


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 99, (16,), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


def native_ops() -> dict[str, int]:
    rows = [row for row in deepytorch.report().rows if row.algorithm != "delegate"]
    return {op: sum(row.calls for row in rows if row.op == op) for op in {row.op for row in rows}}


def build(how: str, folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        bf16=False,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **more,
    )
    given = {"model": model, "args": arguments, "train_dataset": Tokens()}
    if how == "mixin":
        return MixinTrainer(**given, deepytorch={"staging_mb": 16, "compile": "auto"})
    trainer = PlainTrainer(**given)
    return adapter.accelerate_trainer(trainer, staging_mb=16) if how == "existing" else trainer


def fsdp2(rank: int, world_size: int, how: str, folder: Path) -> dict[str, Any]:
    with process_state():
        # Accelerate shards on accelerators only; told that this is one, it does so on the CPU.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        sharding = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        configured = {"use_configured_state": True}
        trainer = build(how, folder, fsdp=True, fsdp_config=sharding, accelerator_config=configured)
        trainer.train()
        assert isinstance(trainer.model_wrapped, torch.distributed.fsdp.FSDPModule)
        (group,) = trainer.model_wrapped.model.layers[0]._get_fsdp_state()._fsdp_param_groups
        return {
            "losses": trainer.losses,
            "native": native_ops(),
            "memory": type(group._all_gather_comm).__name__,
        }


def test_fsdp2_gives_the_losses_of_gloo_by_native_collectives(tmp_path: Path) -> None:
    stock = spawn_ranks(fsdp2, 2, "stock", tmp_path)
    ours = spawn_ranks(fsdp2, 2, "mixin", tmp_path)
    for rank in range(2):
        assert len(stock[rank]["losses"]) == STEPS
        assert ours[rank]["losses"] == stock[rank]["losses"]
        assert ours[rank]["native"]["all_gather"] >= 2 * STEPS
        assert ours[rank]["native"]["reduce_scatter"] >= 2 * STEPS
        assert ours[rank]["memory"] == "ProcessGroupAllocAllGather"


def deepspeed(rank: int, world_size: int, how: str, folder: Path) -> dict[str, Any]:
    configuration = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    with process_state():
        trainer = build(how, folder, deepspeed=configuration)
        trainer.train()
        return {
            "losses": trainer.losses,
            "native": native_ops(),
            "flag": trainer.model_wrapped.config.get("deepytorch"),
        }


@pytest.mark.timeout(300)  # DeepSpeed compiles an operation of its own first
def test_deepspeed_gets_the_flag_and_gives_the_losses_of_gloo(
    tmp_path: Path, deepspeeds_ranks: dict[str, Any]
) -> None:
    results = {
        how: spawn_ranks(deepspeed, 2, how, tmp_path, **deepspeeds_ranks, timeout_s=140)
        for how in ("stock", "mixin", "existing")
    }
    for how in ("mixin", "existing"):
        for rank in range(2):
            assert len(results[how][rank]["losses"]) == STEPS
            assert results[how][rank]["losses"] == results["stock"][rank]["losses"]
            assert results[how][rank]["flag"] == {"staging_mb": 16, "enabled": True}
            assert results[how][rank]["native"]["all_reduce"] >= STEPS
            assert results[how][rank]["native"]["all_gather"] >= STEPS
