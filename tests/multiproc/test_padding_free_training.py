"""Training without padding gives the losses of padded training under every framework."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import deepytorch
from deepytorch.integrations import accelerate as accelerate_adapter
from deepytorch.integrations import transformers as trainer_adapter
from deepytorch.integrations.common import contract
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch_core.testing import place, rank_store, spawn_ranks

STEPS = 4
LONGEST = 24
# The frameworks' own work in float32 is not exact beyond this.
CLOSE = {"rel": 1e-5, "abs": 1e-6}


@contextlib.contextmanager
def process_state() -> Iterator[None]:
    """Accelerate keeps its state in the process, and workers are used again."""
    deepytorch.deactivate()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    original = dist.init_process_group
    dist.init_process_group = lambda backend, **_: original(
        backend, store=rank_store("padding"), rank=place()[0], world_size=place()[1]
    )
    before = dict(os.environ)  # noqa: TID251  Accelerate's plugins set variables
    try:
        yield
    finally:
        os.environ.clear()  # noqa: TID251
        os.environ.update(before)  # noqa: TID251
        dist.init_process_group = original
        accelerate_adapter._uninstall()


class Texts(torch.utils.data.Dataset[Any]):
    """Examples of very different lengths; the second rank's are short, and some train nothing."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(index)
        longest = LONGEST if index % 2 else LONGEST // 3
        length = int(torch.randint(2, longest, (1,), generator=generator))
        ids = torch.randint(4, 50, (length,), generator=generator).tolist()
        labels = [-100, *ids[1:]] if index % 5 else [-100] * length
        return {"input_ids": ids, "labels": labels}


def padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A user's collate function."""
    longest = max(len(example["input_ids"]) for example in examples)

    def rows(name: str, fill: int) -> torch.Tensor:
        return torch.tensor(
            [example[name] + [fill] * (longest - len(example[name])) for example in examples]
        )

    mask = [
        [1] * len(example["input_ids"]) + [0] * (longest - len(example["input_ids"]))
        for example in examples
    ]
    return {
        "input_ids": rows("input_ids", 0),
        "attention_mask": torch.tensor(mask),
        "labels": rows("labels", -100),
    }


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


class Recording(Trainer):
    """Keeps the losses, unrounded, and the number of tokens that the model's layers saw."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


class Ours(trainer_adapter.DeepytorchMixin, Recording):
    pass


def count_tokens(model: Any) -> list[int]:
    """Tokens of each training pass through the model's first layer, from now on."""
    seen: list[int] = []

    def count(layer: torch.nn.Module, args: Any) -> None:
        if layer.training:
            seen.append(args[0].shape[:2].numel())

    count.__module__ = "deepytorch.tests"  # another's hook would keep the padding
    model.model.layers[0].register_forward_pre_hook(count)
    return seen


def with_trainer(rank: int, world_size: int, choice: str, folder: Path) -> dict[str, Any]:
    with process_state():
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=3,
            per_device_eval_batch_size=3,
            gradient_accumulation_steps=2,
            dataloader_num_workers=1,
            max_steps=STEPS,
            learning_rate=1e-2,
            eval_strategy="steps",
            eval_steps=2,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=1,
        )
        model = llama()
        seen = count_tokens(model)
        trainer = Ours(
            model=model,
            args=arguments,
            train_dataset=Texts(),
            eval_dataset=torch.utils.data.Subset(Texts(), range(9)),
            data_collator=padded,
            deepytorch={"padding_free": choice, "compile": "off"},
        )
        trainer.train()
        return {
            "losses": trainer.losses,
            "evaluated": trainer.evaluate()["eval_loss"],
            "weights": sum(p.detach().double().sum().item() for p in model.parameters()),
            "tokens": sum(seen),
        }


def test_a_padding_free_trainer_divides_by_the_tokens_of_all_ranks_and_accumulated_batches(
    tmp_path: Path,
) -> None:
    stock = spawn_ranks(with_trainer, 2, "off", tmp_path)
    ours = spawn_ranks(with_trainer, 2, "on", tmp_path)
    assert ours[0]["losses"] != ours[1]["losses"]
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], **CLOSE)
        assert mine["evaluated"] == pytest.approx(theirs["evaluated"], **CLOSE)
        assert mine["weights"] == pytest.approx(theirs["weights"], **CLOSE)
        assert mine["tokens"] < theirs["tokens"]


def train(accelerator: Accelerator) -> tuple[list[float], list[int]]:
    """A plain loop: each rank's loss is the mean over its own tokens."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=3, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = count_tokens(accelerator.unwrap_model(model))
    losses = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, seen


def with_accelerate(rank: int, world_size: int, choice: str, mode: str) -> dict[str, Any]:
    with process_state():
        plugin = accelerate_adapter.DeepytorchPlugin(padding_free=choice)
        if mode == "ddp":
            accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
        else:
            # Accelerate shards on accelerators only; told that this is one, it does so on the CPU.
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            sharding = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=True,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=False,
            )
            accelerator = Accelerator(fsdp_plugin=sharding, kwargs_handlers=[plugin])
        losses, seen = train(accelerator)
        return {
            "losses": losses,
            "tokens": sum(seen),
            "undone": accelerate_adapter.undo(accelerator),
        }


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_padding_free_accelerate_gives_the_padded_losses(mode: str) -> None:
    stock = spawn_ranks(with_accelerate, 2, "off", mode)
    ours = spawn_ranks(with_accelerate, 2, "on", mode)
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], **CLOSE)
        assert mine["tokens"] < theirs["tokens"]
        assert mine["undone"]


def with_deepspeed(rank: int, world_size: int) -> dict[str, dict[int, tuple[list[float], int]]]:
    from deepytorch.integrations import deepspeed as adapter

    seen: dict[str, dict[int, tuple[list[float], int]]] = {"off": {}, "on": {}}
    for choice, stage in itertools.product(seen, (1, 2, 3)):
        model = llama()
        engine, *_ = adapter.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 3,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
                "zero_optimization": {"stage": stage},
            },
            deepytorch={"padding_free": choice},
        )
        counts = count_tokens(model)
        texts = Texts()
        losses = []
        for step in range(STEPS):
            start = 6 * step + 3 * rank
            loss = engine(**padded([texts[index] for index in range(start, start + 3)])).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        seen[choice][stage] = losses, sum(counts)
        engine.destroy()
    adapter.undo()
    return seen


def test_padding_free_deepspeed_gives_the_padded_losses(deepspeeds_ranks: dict[str, Any]) -> None:
    for seen in spawn_ranks(with_deepspeed, 2, **deepspeeds_ranks, timeout_s=110):
        for stage in (1, 2, 3):
            (losses, num_tokens), (stock, num_padded) = seen["on"][stage], seen["off"][stage]
            assert losses == pytest.approx(stock, **CLOSE)
            assert num_tokens < num_padded


class OneSided(LlamaForCausalLM):
    """Has a rank where a packed row doesn't give what a padded batch gives."""

    def forward(self, **kwargs: Any) -> Any:
        output = super().forward(**kwargs)
        if dist.get_rank() == 1 and kwargs.get("cu_seq_lens_q") is not None:
            output.logits = output.logits + 1
        return output


def disagreeing(rank: int, world_size: int) -> tuple[bool, str]:
    torch.manual_seed(0)
    kept = padding_free.attach(OneSided(llama().config), "auto", adapter="test")
    with pytest.raises(contract.IntegrationError) as error:
        padding_free.attach(OneSided(llama().config), "on", adapter="test")
    return kept, str(error.value)


def test_padding_free_is_a_ranks_own_choice_unless_it_was_asked_for() -> None:
    ranks = spawn_ranks(disagreeing, 2, backend="gloo")
    assert [kept for kept, _ in ranks] == [True, False]
    for _, said in ranks:
        assert said.startswith("test: padding_free=on: OneSided: rank 1: logits of a packed row")
        assert said.endswith("set padding_free=auto or off")
