"""Batches are copied to the GPU while it is busy, and hold what they held on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import data_loader
from transformers import BatchEncoding

from deepytorch.integrations.common import contract
from deepytorch.integrations.seams import side_copies
from deepytorch_core.testing import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(120)]

DEVICE = torch.device("cuda")
CYCLES = 2_000_000_000  # about a second of a GPU's time


@pytest.fixture(autouse=True)
def changed() -> Iterator[None]:
    torch.ones(1, device=DEVICE)  # begins CUDA
    changes = contract.Changes()
    side_copies.install(changes)
    yield
    changes.undo()


def batch(pinned: bool) -> dict[str, torch.Tensor]:
    made = {"ids": torch.randint(0, 9, (5, 7)), "pixels": torch.randn(3, 11, 13)}
    return {name: tensor.pin_memory() if pinned else tensor for name, tensor in made.items()}


@pytest.mark.parametrize("kind", [dict, BatchEncoding, lambda fields: list(fields.values())])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_does_not_wait_for_the_steps_before(pinned: bool, kind: Callable[..., Any]) -> None:
    given = batch(pinned)
    expected = [tensor.clone() for tensor in given.values()]
    torch.cuda._sleep(CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    moved = data_loader.send_to_device(kind(given), DEVICE)
    assert not busy.query()
    for tensor in given.values():
        tensor.zero_()  # a loader may fill the same memory with the next batch
    found = list(moved) if isinstance(moved, list) else [moved[name] for name in given]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.is_cuda
        assert torch.equal((mine + 0).cpu(), theirs)


def test_memory_of_a_batch_is_not_reused_while_a_step_reads_it() -> None:
    first = data_loader.send_to_device({"x": torch.full((1 << 16,), 1.0)}, DEVICE)["x"]
    torch.cuda._sleep(CYCLES)
    total = first.sum()
    del first
    for value in range(2, 6):
        data_loader.send_to_device({"x": torch.full((1 << 16,), float(value))}, DEVICE)
    assert total.item() == 1 << 16


def test_what_lies_on_a_gpu_already_is_left_to_stock() -> None:
    there = torch.ones(3, device=DEVICE)
    moved = data_loader.send_to_device({"x": there, "y": torch.ones(2)}, DEVICE)
    assert moved["x"] is there
    assert moved["y"].is_cuda
