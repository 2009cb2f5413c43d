"""transformers' Trainer and TRL's SFTTrainer on deepytorch give the losses of stock ones; undo."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import deepytorch
from deepytorch.integrations import transformers as adapter
from deepytorch.integrations.common import contract
from deepytorch.recipes.data.text import byte_tokenizer
from deepytorch_core.c10d.patches import serving_name
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


class PlainSFT(Recording, SFTTrainer):
    pass


class MixinSFT(adapter.DeepytorchMixin, PlainSFT):
    pass


def fine_tune(rank: int, world_size: int, how: str, folder: Path, packing: bool) -> dict[str, Any]:
    with process_state():
        before = native_ops()
        tokenizer = byte_tokenizer()
        texts = [{"text": f"{index} times {index} is {index * index}"} for index in range(64)]
        args = arguments(folder, SFTConfig, packing=packing, max_length=64, dataset_num_proc=None)
        given = {
            "model": llama(len(tokenizer)),
            "args": args,
            "train_dataset": datasets.Dataset.from_list(texts),
            "processing_class": tokenizer,
        }
        if how == "mixin":
            trainer = MixinSFT(**given, deepytorch={"padding_free": "off", "compile": "off"})
        else:
            trainer = PlainSFT(**given)
        if how == "existing":
            # Rows without padding are not bit for bit the same.
            adapter.accelerate_trainer(trainer, padding_free="off", compile="off")
        trainer.train()
        after = native_ops()
        return {
            "losses": trainer.losses,
            "native": {op: n - before.get(op, 0) for op, n in after.items()},
            "examples": len(trainer.train_dataset),
        }


@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.extended), True])
def test_trls_sft_trainer_gives_the_losses_of_gloo(packing: bool, tmp_path: Path) -> None:
    stock = spawn_ranks(fine_tune, 2, "stock", tmp_path, packing)
    for how in ("mixin", "existing"):
        ours = spawn_ranks(fine_tune, 2, how, tmp_path, packing)
        for rank in range(2):
            assert len(ours[rank]["losses"]) == STEPS
            assert ours[rank]["losses"] == stock[rank]["losses"]
            assert ours[rank]["native"]["all_reduce"] >= STEPS
            assert (ours[rank]["examples"] < 64) == packing


def apply_and_undo(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    with process_state():
        trainer = build("stock", folder)
        found, accelerators = vars(trainer).copy(), vars(trainer.accelerator).keys()
        for _ in range(2):
            assert adapter.accelerate_trainer(trainer) is trainer
        first = trainer.accelerator
        during = serving_name()
        # As for every trial of a hyperparameter search.
        trainer.create_accelerator_and_postprocess()
        renewed = trainer.accelerator is not first and any(
            "deepytorch" in name for name in vars(trainer.accelerator)
        )
        trainer.accelerator = first
        undone = [adapter.undo(trainer), adapter.undo(trainer)]
        return {
            "during": during,
            "renewed": renewed,
            "undone": undone,
            "keys": found.keys() ^ vars(trainer).keys(),
            "accelerator": accelerators ^ vars(trainer.accelerator).keys(),
            "backend": serving_name(),
            "active": deepytorch.is_active(),
        }


def test_undo_leaves_the_trainer_as_found(tmp_path: Path) -> None:
    for seen in spawn_ranks(apply_and_undo, 2, tmp_path):
        assert seen == {
            "during": "deepytorch",
            "renewed": True,
            "undone": [True, False],
            "keys": set(),
            "accelerator": set(),
            "backend": "gloo",
            "active": False,
        }


def undo_mixin(rank: int, world_size: int, folder: Path) -> tuple[str, list[bool], str]:
    with process_state():
        trainer = build("mixin", folder)
        return (
            serving_name(),
            [adapter.undo(trainer), adapter.undo(trainer)],
            serving_name(),
        )


def test_a_mixins_trainer_is_undone_too(tmp_path: Path) -> None:
    results = spawn_ranks(undo_mixin, 2, tmp_path)
    assert results == [("deepytorch", [True, False], "gloo")] * 2


def switched_off(rank: int, world_size: int, folder: Path) -> tuple[str, set[str]]:
    with process_state():
        trainer = build("stock", folder)
        found = set(vars(trainer))
        adapter.accelerate_trainer(trainer)
        return serving_name(), found ^ set(vars(trainer))


def test_switched_off_it_is_the_stock_trainer(tmp_path: Path) -> None:
    env = {"DEEPYTORCH_ENABLED": "0"}
    assert spawn_ranks(switched_off, 2, tmp_path, env=env) == [("gloo", set())] * 2


def refused(rank: int, world_size: int, folder: Path, options: list[dict[str, Any]]) -> str:
    with process_state():
        trainer = build("stock", folder)
        with pytest.raises(contract.IntegrationError) as error:
            adapter.accelerate_trainer(trainer, **options[rank])
        return str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([{}, {"kernel": "on"}], "transformers on rank 1: unknown option 'kernel' (did you mean"),
        (
            [{"enabled": True}, {"enabled": False}],
            "transformers: rank 0 was given enabled=True and rank 1 enabled=False: give every rank",
        ),
    ],
)
def test_wrong_or_mixed_options_are_one_error_on_every_rank(
    options: list[dict[str, Any]], said: str, tmp_path: Path
) -> None:
    for message in spawn_ranks(refused, 2, tmp_path, options):
        assert message.startswith(said)
        assert "\n" not in message


def test_a_version_that_is_not_known_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "4.30.0")
    AcceleratorState._reset_state(reset_partial_state=True)
    deepytorch.activate()
    with pytest.raises(contract.IntegrationError, match="transformers 4.30.0 is not known"):
        build("ready", tmp_path)


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    spec = importlib.util.find_spec("deepytorch.integrations.transformers")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(contract.IntegrationError, match="transformers is not installed: pip"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
