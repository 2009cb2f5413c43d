"""Figures of deepytorch's come where transformers' Trainer and Accelerate log, and nowhere else."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import deepytorch
from deepytorch.integrations import accelerate as accelerate_adapter
from deepytorch.integrations import transformers as adapter
from deepytorch.integrations.common import around
from deepytorch_core.testing import place, rank_store, spawn_ranks

OFF = {"compile": "off", "kernels": "off", "padding_free": "off", "tune": "off"}
STEPS = 6
NAMES = {"step_ms", "exposed_share", "data_share", "operations", "mbytes", "native_share"}
# Figures that are seen only if a rank waited for another.
WAITING = {"waited_share", "straggler", "straggler_share"}
LATE_S = 0.5  # how much later one of two ranks begins each step


@contextlib.contextmanager
def process_state() -> Iterator[None]:
    """Both keep their state in the process, and workers are used again."""
    deepytorch.deactivate()  # importing this module has activated it
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    original = dist.init_process_group
    dist.init_process_group = lambda backend, **keywords: original(
        backend,
        store=rank_store("figures"),
        **{"rank": place()[0], "world_size": place()[1], **keywords},
    )
    try:
        yield
    finally:
        dist.init_process_group = original
        accelerate_adapter._uninstall()


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 16) % 99
        return {"input_ids": ids, "labels": ids.clone()}


class Reporter(TrainerCallback):
    """One of the user's own; it may keep its rank from beginning a step."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.seen: list[dict[str, Any]] = []
        self.delay_s = delay_s

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(self.delay_s)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append(dict(logs))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> steps with values, of all event files below a folder."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in folder.rglob("events.out*"):
        accumulator = EventAccumulator(str(file)).Reload()
        for tag in accumulator.Tags()["scalars"]:
            rows = [(event.step, event.value) for event in accumulator.Scalars(tag)]
            found.setdefault(tag, []).extend(rows)
    return found


def events(folder: Path) -> dict[str, list[int]]:
    """Tag -> steps, of all event files below a folder."""
    return {tag: [step for step, _ in rows] for tag, rows in scalars(folder).items()}


def check_waiting(found: dict[str, list[tuple[int, float]]], steps: list[int], late: int) -> None:
    """TensorBoard shows at these steps that the rank `late` held up the other."""
    rows = {tag.rpartition("/")[2]: rows for tag, rows in found.items() if "deepytorch/" in tag}
    assert rows.keys() >= WAITING
    # Before the first of them the other may be the late one, or nobody: files are being opened.
    later = {name: [row for row in rows[name] if row[0] > steps[0]] for name in WAITING}
    for name in WAITING:
        assert [step for step, _ in later[name]] == steps[1:], name
    assert [rank for _, rank in later["straggler"]] == [late] * (len(steps) - 1)
    for name in ("waited_share", "straggler_share"):
        # Only one of two ranks waits at a time, so it is not more than all the time.
        assert all(0 < share <= 1 for _, share in later[name]), (name, later[name])


def trainer_logs(
    rank: int, world_size: int, how: str, folder: Path, late: int | None = None
) -> dict[str, Any]:
    with process_state():
        known = len(deepytorch.report().course["losses"])
        small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=100, num_attention_heads=2, **small))
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=2,
            max_steps=STEPS,
            logging_steps=2,
            save_strategy="no",
            report_to=["tensorboard"],
            disable_tqdm=True,
        )
        reporter = Reporter(LATE_S if rank == late else 0.0)
        given = {"model": model, "args": arguments, "train_dataset": Tokens()}
        given["callbacks"] = [reporter]
        if how == "mixin":
            trainer = adapter.DeepytorchTrainer(**given, deepytorch=OFF)
        else:
            trainer = adapter.accelerate_trainer(Trainer(**given), **OFF)
        callbacks = len(trainer.callback_handler.callbacks)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            trainer.train()
        adapter.undo(trainer)
        return {
            "seen": reporter.seen,
            "history": trainer.state.log_history,
            "printed": printed.getvalue(),
            "losses": deepytorch.report().course["losses"][known:],
            "undone": callbacks - len(trainer.callback_handler.callbacks),
            "events": events(folder) if rank == 0 else {},
            "scalars": scalars(folder) if rank == 0 else {},
        }


def check_trainer(how: str, folder: Path) -> None:
    first, second = spawn_ranks(trainer_logs, 2, how, folder)
    figures = [logs for logs in first["seen"] if "loss" in logs]
    assert len(figures) == STEPS // 2
    for logs in figures:
        assert {f"deepytorch/{name}" for name in NAMES} <= logs.keys()
        assert logs["deepytorch/step_ms"] > 0
        assert 0 <= logs["deepytorch/exposed_share"] <= 1
        assert logs["deepytorch/operations"] >= 1
    # Neither in what is not about training, nor printed, nor kept, nor on other ranks.
    other = [logs for logs in first["seen"] if "loss" not in logs]
    for values in (*other, *first["history"], *second["seen"]):
        assert not any("deepytorch" in name for name in values)
    assert "loss" in first["printed"]
    assert "deepytorch" not in first["printed"]
    assert [step for step, _ in first["losses"]] == [2, 4, 6]
    assert [loss for _, loss in first["losses"]] == [logs["loss"] for logs in figures]
    assert first["undone"] == second["undone"] == 1
    assert first["events"]["train/deepytorch/step_ms"] == first["events"]["train/loss"] == [2, 4, 6]


def test_a_trainers_reporters_get_them(tmp_path: Path) -> None:
    check_trainer("mixin", tmp_path / "mixin")
    check_trainer("existing", tmp_path / "existing")


def test_a_trainers_tensorboard_names_the_straggler(tmp_path: Path) -> None:
    first, _ = spawn_ranks(trainer_logs, 2, "mixin", tmp_path, late=1)
    check_waiting(first["scalars"], [2, 4, 6], late=1)
    assert {f"train/deepytorch/{name}" for name in WAITING} <= first["scalars"].keys()


def accelerator_logs(
    rank: int, world_size: int, folder: Path, late: int | None = None
) -> dict[str, Any]:
    with process_state():
        known = len(deepytorch.report().course["losses"])
        accelerator = Accelerator(
            cpu=True,
            log_with="tensorboard",
            project_dir=str(folder),
            kwargs_handlers=[accelerate_adapter.DeepytorchPlugin(**OFF)],
        )
        accelerator.init_trackers("run")
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        values = {}
        for step in range(1, 4):
            time.sleep(LATE_S if rank == late else 0.0)
            loss = model(torch.ones(4, 8)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            values = {"train_loss": loss.item()}
            accelerator.log(values, step=step)
        accelerator.log({"accuracy": 0.5}, step=3)
        accelerator.end_training()
        losses = deepytorch.report().course["losses"][known:]
        logged = around.is_put(accelerator, "log")
        accelerate_adapter.undo(accelerator)
        return {
            "values": values,
            "losses": losses,
            "events": events(folder) if rank == 0 else {},
            "scalars": scalars(folder) if rank == 0 else {},
            "log": [logged, around.is_put(accelerator, "log")],
        }


def test_accelerates_trackers_get_them(tmp_path: Path) -> None:
    first, second = spawn_ranks(accelerator_logs, 2, tmp_path)
    assert set(first["values"]) == {"train_loss"}, "the caller's dict is his own"
    assert [step for step, _ in first["losses"]] == [1, 2, 3]
    assert second["losses"] == []
    assert first["log"] == second["log"] == [True, False]
    assert first["events"]["train_loss"] == [1, 2, 3]
    assert first["events"]["deepytorch/step_ms"] == [1, 2, 3], "no step between 3 and accuracy"
    assert first["events"]["accuracy"] == [3]


def test_accelerates_tensorboard_names_the_straggler(tmp_path: Path) -> None:
    first, _ = spawn_ranks(accelerator_logs, 2, tmp_path, late=1)
    check_waiting(first["scalars"], [1, 2, 3], late=1)
