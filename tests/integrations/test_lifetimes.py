"""Tests that what nobody asked about lives no longer than in stock and imports nothing early."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch_core.base import config, decisions
from deepytorch_core.c10d import activation
from deepytorch_core.testing import spawn_ranks

pytest.importorskip("accelerate")

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(images).mean((2, 3)))


def convolutional() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    return Net(), lambda model: model(torch.ones(2, 3, 8, 8)).square().mean()


def padded() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    import transformers as hf

    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, num_attention_heads=2, pad_token_id=0))
    ids = torch.arange(1, 25).view(2, 12)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return model, lambda model: model(**batch).loss


def trained(make: Callable[[], Any]) -> dict[str, weakref.ref[Any]]:
    """A short training, of which nobody keeps anything."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loss_of = make()
    own = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(range(8), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, own, loader)
    for _ in range(STEPS):
        accelerator.backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()
    kept = {
        "accelerator": accelerator,
        "model": model,
        "parameter": next(model.parameters()),
        "loader": loader,
        "torch's optimizer": own,
    }
    references = {name: weakref.ref(thing) for name, thing in kept.items()}
    accelerator.free_memory()
    return references


def alive(rank: int, world_size: int, folder: str, kind: str) -> tuple[list[str], list[str]]:
    # Compilation has cycles of its own.
    profile = f"{folder}/profile.json"
    activation.leave_models_alone(False)
    deepytorch.activate(tune="auto", profile=profile, patience="off", compile="off")
    make = {"convolutional": convolutional, "padded": padded}[kind]
    # Frameworks' first imports leave cycles of their own, those of torch's compiler among them.
    make()[1](make()[0])
    gc.collect()
    gc.disable()  # as it may not come for long
    found = trained(make)
    chosen = [decision["chosen"] for decision in decisions.made()]
    return [name for name, reference in found.items() if reference() is not None], chosen


@pytest.mark.parametrize(("kind", "chosen"), [("convolutional", ""), ("padded", "packed")])
def test_what_was_prepared_goes_with_its_last_reference(
    kind: str, chosen: str, tmp_path: Path, deepspeeds_ranks: dict[str, Any]
) -> None:
    ((left, made),) = spawn_ranks(alive, 1, str(tmp_path), kind, **deepspeeds_ranks)
    assert left == []
    assert made
    assert not chosen or chosen in made


FIRST_IMPORT = """
import gc, sys, weakref
from torch import nn
import deepytorch
gc.collect()
gc.disable()
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
was_early = "torch._dynamo" in sys.modules
accelerator.prepare(nn.Linear(2, 2))
reference = weakref.ref(accelerator)
del accelerator
print(was_early, "torch._dynamo" in sys.modules, reference() is None)
"""


def test_torchs_compiler_is_imported_with_a_model_and_keeps_none_alive(tmp_path: Path) -> None:
    """An Accelerator alone does not wait seconds for it. In a process that has nothing yet."""
    environment = config.child_environment(DEEPYTORCH_PROFILE=str(tmp_path / "profile.json"))
    done = subprocess.run(
        [sys.executable, "-c", FIRST_IMPORT], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split()[-3:] == ["False", "True", "True"], done.stderr
