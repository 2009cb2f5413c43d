"""Option `compile` through the adapters: the model trained there is compiled, and trains alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch_core.testing import spawn_ranks

pytestmark = pytest.mark.timeout(240)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Losing(Stack):
    """As a Trainer wants it: takes a batch, gives its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (super().forward(x) - labels).square().mean()}


def state(model: nn.Module) -> tuple[int, Any]:
    from deepytorch_core import compile as engine

    found = engine.compilation_of(model)
    assert found is not None
    return sum(len(region.region.modules) for region in found.regions), [
        region.failure for region in found.regions
    ]


def with_accelerate(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from deepytorch.integrations import accelerate as adapter

    found = []
    for way in ("off", "aot-eager"):
        plugin = adapter.DeepytorchPlugin(compile=way)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
        model = Stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 8)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        compiled = state(model) if way != "off" else None
        adapter.undo(accelerator)
        inner = accelerator.unwrap_model(model)
        found.append(
            (losses, compiled, any("_compiled_call_impl" in vars(layer) for layer in inner.layers))
        )
        AcceleratorState._reset_state(reset_partial_state=False)
    return found


def test_compile_option_of_the_plugin(deepspeeds_ranks: dict[str, Any]) -> None:
    for stock, ours in spawn_ranks(with_accelerate, 2, **deepspeeds_ranks):
        assert ours[0] == pytest.approx(stock[0], rel=1e-5)
        assert ours[1] == (6, [None])
        assert not ours[2]


def left_alone(rank: int, world_size: int) -> list[Any]:
    from accelerate import Accelerator

    from deepytorch.integrations import accelerate as adapter
    from deepytorch_core import compile as engine
    from deepytorch_core.base import decisions

    accelerator = Accelerator(cpu=True, kwargs_handlers=[adapter.DeepytorchPlugin()])
    models = [Stack(), Stack(), Stack()]
    models[1].compile(backend="eager")
    models[2].layers[3].compile(backend="eager")
    prepared = [accelerator.prepare(model) for model in models]
    waiting = [engine.compilation_of(model) is not None for model in prepared]
    prepared[0](torch.randn(4, 8)).sum().backward()
    reasons = [
        decision["reason"]
        for decision in decisions.made()
        if decision["what"] == "compile of Stack"
    ]
    adapter.undo(accelerator)
    return [waiting, reasons]


def test_compile_auto_waits_and_leaves_alone_what_the_script_compiles(
    deepspeeds_ranks: dict[str, Any],
) -> None:
    ((waiting, reasons),) = spawn_ranks(left_alone, 1, **deepspeeds_ranks)
    assert waiting == [True, False, False]
    assert reasons == ["compiled by the script"] * 2 + ["not measured: tune=off"]


def with_trainer(rank: int, world_size: int, folder: str) -> list[tuple[Any, ...]]:
    from transformers import TrainingArguments

    from deepytorch.integrations.transformers import DeepytorchTrainer

    torch.manual_seed(1)
    data = [{"x": torch.randn(8), "labels": torch.randn(8)} for _ in range(12)]
    found = []
    for way in ("off", "aot-eager"):
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=3,
            per_device_train_batch_size=4,
            report_to=[],
            logging_steps=1,
        )
        options = {"compile": way}
        trainer = DeepytorchTrainer(Losing(), arguments, train_dataset=data, deepytorch=options)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        found.append((losses, state(trainer.model_wrapped) if way != "off" else None))
    return found


def test_compile_option_of_the_trainer(tmp_path: Path, deepspeeds_ranks: dict[str, Any]) -> None:
    ((stock, ours),) = spawn_ranks(with_trainer, 1, str(tmp_path), **deepspeeds_ranks)
    assert ours[0] == pytest.approx(stock[0], rel=1e-4)
    assert ours[1] == (6, [None])


def with_deepspeed(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    import deepspeed

    import deepytorch  # noqa: F401
    from deepytorch_core.base import decisions

    found = []
    for stage in (1, 3):
        runs = []
        for compile in ("off", "aot-eager"):
            model = Stack()
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=model.parameters(),
                config={
                    "train_micro_batch_size_per_gpu": 4,
                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
                    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                    "deepytorch": {"enabled": True, "compile": compile},
                },
            )
            generator = torch.Generator().manual_seed(rank)
            losses = []
            for _ in range(3):
                loss = engine(torch.randn(4, 8, generator=generator)).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            runs.append(losses)
        compiled = state(engine) if stage == 1 else decisions.made()[-1]["reason"]
        found.append((stage, *runs, compiled))
    return found


def test_compile_option_of_deepspeed(deepspeeds_ranks: dict[str, Any]) -> None:
    # DeepSpeed compiles an extension the first time.
    for rank in spawn_ranks(with_deepspeed, 2, **deepspeeds_ranks, timeout_s=200):
        for stage, stock, ours, compiled in rank:
            assert ours == pytest.approx(stock, rel=1e-5), stage
            left = "nothing is left to compile between the hooks of its modules"
            assert compiled == ((6, [None]) if stage == 1 else left)
