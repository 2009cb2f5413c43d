# SPDX-License-Identifier: Apache-2.0
"""A recipe's checkpoint goes on with fewer and with more processes: the same losses.

Run by `make test-faults`: it starts processes of three numbers.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process
from deepytorch.recipes.data.batches import EndlessBatches
from deepytorch.recipes.runner import checkpoint, elastic
from deepytorch.recipes.runner.checkpoint import Written
from deepytorch.recipes.runner.engines import start_engine
from deepytorch_core.testing import spawn_ranks

EXAMPLES = 50
PER_STEP = 8
SAVED_AFTER, STEPS = 4, 9  # an epoch ends after step 6
FACTS = {"recipe": "r"}


def examples_of(index, epoch):
    generator = torch.Generator().manual_seed(100 * epoch + index)
    return torch.randn(6, generator=generator)


def batches_of(rank, world_size, batch_size=2):
    return EndlessBatches(
        EXAMPLES,
        examples_of,
        torch.stack,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        seed=1,
    )


class Net(nn.Module):
    """Blocks as a transformer has; no dimension is a multiple of two or four."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(2)]
        )
        self.last = nn.Linear(6, 3)

    def forward(self, value):
        for block in self.blocks:
            value = block(value)
        return self.last(value)


def train(rank, world_size, engine_name, folder, resume):
    """Losses by step, of steps that the checkpoint had not seen; saves one if there is none."""
    process = Process(rank, world_size, torch.device("cpu"))
    options = RunOptions(
        name="r",
        engine=engine_name,
        batch_size=2,
        accumulation=PER_STEP // 2 // world_size,
        backend="stock",
    )
    path = folder / f"step-{SAVED_AFTER:08d}"
    if resume:
        written = checkpoint.written(path)
        wrong = RunOptions(name="r", engine=engine_name, batch_size=2, accumulation=77)
        options = elastic.fit(
            options if written.world_size == world_size else wrong, written, process, path
        )
    engine = start_engine(
        Net().double(), lambda those: torch.optim.AdamW(those, lr=0.01), options, process
    )
    batches = batches_of(rank, world_size)
    begin = 0
    if resume:
        state = checkpoint.load(engine, path, process, facts=FACTS)
        assert ("random" in state) == (rank < written.world_size)
        elastic.go_on(batches, state, written, options, process)
        begin = state["step"]
    losses = {}
    for step in range(begin + 1, STEPS + 1):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(options.accumulation):
            with engine.accumulating(last=number == options.accumulation - 1):
                output = engine.wrapped(next(batches).double())
                loss = output.square().sum() / PER_STEP
                engine.backward(loss * world_size)  # engines take the mean over ranks
                total += loss.detach()
        engine.step()
        dist.all_reduce(total)
        losses[step] = total.item()
        if step == SAVED_AFTER and not resume:
            state = {
                "step": step,
                "position": batches.position,
                "epoch_examples": batches.epoch_examples,
                "random": checkpoint.random_state(process.device),
            }
            written = Written(world_size, options.batch_size, options.accumulation)
            problem = checkpoint.save(
                engine, state, folder, process, keep=1, facts=FACTS, written=written
            )
            assert problem is None
    return losses


def train_all(rank, world_size, folder, resume):
    """By engine; in one call, as processes cost more than training."""
    return {
        engine: train(rank, world_size, engine, Path(folder) / engine, resume)
        for engine in ("ddp", "fsdp2")
    }


def test_losses_go_on_with_fewer_and_with_more(tmp_path):
    (expected, *_) = spawn_ranks(train_all, 2, str(tmp_path), False, backend="gloo")
    for world_size in (1, 4):
        for found in spawn_ranks(train_all, world_size, str(tmp_path), True, backend="gloo"):
            for engine, losses in found.items():
                assert list(losses) == list(range(SAVED_AFTER + 1, STEPS + 1))
                for step, loss in losses.items():
                    what = (engine, world_size, step)
                    assert loss == pytest.approx(expected[engine][step], rel=1e-9), what
