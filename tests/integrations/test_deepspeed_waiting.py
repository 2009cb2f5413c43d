"""A rank that sleeps under ZeRO: DeepSpeed's own groups have torch's long default limit."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepytorch
from deepytorch_core.hang import waiting
from deepytorch_core.testing import rank_store, spawn_ranks

HERE = os.path.basename(__file__)
SLEEPER = 2
MOST_S = 60.0


def engine(stage: int) -> Any:
    import deepspeed

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    configuration = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    made, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=configuration
    )
    return made


class Said(io.StringIO):
    """Output of a rank; `told` is there once it has named the sleeper."""

    def __init__(self, told: Path) -> None:
        super().__init__()
        self._told = told

    def write(self, text: str) -> int:
        if f": rank {SLEEPER} " in text:
            self._told.touch()
        return super().write(text)


def sleep_until(told: Path) -> None:
    end = time.monotonic() + MOST_S
    while not told.exists() and time.monotonic() < end:
        time.sleep(0.1)


def sleep_in_step_1(rank: int, world_size: int, stage: int, folder: str) -> tuple[list[float], str]:
    waiting.FIRST_S, waiting.AGAIN = 2.0, 1000
    deepytorch.activate()
    limit = timedelta(seconds=MOST_S / 2)  # which DeepSpeed's groups don't have
    dist.init_process_group(
        "gloo", store=rank_store("job"), rank=rank, world_size=world_size, timeout=limit
    )
    made, losses, told = engine(stage), [], Path(folder) / "told"
    with contextlib.redirect_stderr(Said(told)) as said:
        for step in range(3):
            if rank == SLEEPER and step == 1:
                sleep_until(told)
            loss = made(torch.ones(2, 8)).square().mean()
            made.backward(loss)
            made.step()
            losses.append(loss.item())
    return losses, said.getvalue()


@pytest.mark.parametrize(
    "stage", [2, *(pytest.param(stage, marks=pytest.mark.extended) for stage in (1, 3))]
)
def test_a_sleeper_is_named_while_the_others_wait(
    stage: int, tmp_path: Path, deepspeeds_ranks: dict[str, Any]
) -> None:
    found = spawn_ranks(sleep_in_step_1, 3, stage, str(tmp_path), timeout_s=150, **deepspeeds_ranks)
    losses = [rank[0] for rank in found]
    assert losses == [losses[0]] * 3
    limit_s = 30 if stage == 3 else 1800  # there it waits in the default group
    assert re.search(
        r"rank [01] has waited .* of group \S+ \(.*: rank 2 \(node .*\) has not entered it; it "
        rf"is in {HERE}:\d+ time.sleep\(0.1\) for .* s; the time limit of {limit_s} s ends ",
        found[0][1] + found[1][1],
    ), found
