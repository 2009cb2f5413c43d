# SPDX-License-Identifier: Apache-2.0
"""A checkpoint goes on with other numbers of processes: the same examples, the same weights."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepytorch.recipes import _checkpoint, _elastic
from deepytorch.recipes._batches import EndlessBatches
from deepytorch.recipes._checkpoint import Written
from deepytorch.recipes._config import RecipeError
from deepytorch.recipes._engines import start_engine
from deepytorch.recipes._options import RunOptions
from deepytorch.recipes._run import Process
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
    path = Path(folder) / f"step-{SAVED_AFTER:08d}"
    if resume:
        written = _checkpoint.written(path)
        wrong = RunOptions(name="r", engine=engine_name, batch_size=2, accumulation=77)
        options = _elastic.fit(
            options if written.world_size == world_size else wrong, written, process, path
        )
    engine = start_engine(
        Net().double(), lambda those: torch.optim.AdamW(those, lr=0.01), options, process
    )
    batches = batches_of(rank, world_size)
    begin = 0
    if resume:
        state = _checkpoint.load(engine, path, process, facts=FACTS)
        assert ("random" in state) == (rank < written.world_size)
        _elastic.go_on(batches, state, written, options, process)
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
                "random": _checkpoint.random_state(process.device),
            }
            written = Written(world_size, options.batch_size, options.accumulation)
            problem = _checkpoint.save(
                engine, state, Path(folder), process, keep=1, facts=FACTS, written=written
            )
            assert problem is None
    return losses


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_losses_go_on_with_fewer_and_with_more(engine, tmp_path):
    (expected, *_) = spawn_ranks(train, 2, engine, str(tmp_path), False, backend="gloo")
    for world_size in (1, 4):
        for losses in spawn_ranks(train, world_size, engine, str(tmp_path), True, backend="gloo"):
            assert list(losses) == list(range(SAVED_AFTER + 1, STEPS + 1))
            for step, loss in losses.items():
                assert loss == pytest.approx(expected[step], rel=1e-9), (world_size, step)


def process(world_size, rank=0):
    return Process(rank, world_size, torch.device("cpu"))


def test_steps_stay_as_large():
    options = RunOptions(name="r", batch_size=4, accumulation=1)
    written = Written(4, batch_size=4, accumulation=2)
    for world_size, accumulation in ((1, 8), (2, 4), (8, 1)):
        fitted = _elastic.fit(options, written, process(world_size), Path("c"))
        assert fitted.accumulation == accumulation
    assert _elastic.fit(options, written, process(4), Path("c")) == options
    with pytest.raises(RecipeError, match="4 wrote it, with 32 examples in each step"):
        _elastic.fit(options, written, process(3), Path("c"))
    with pytest.raises(RecipeError, match="an unknown number of examples"):
        _elastic.fit(options, Written(4), process(2), Path("c"))
    zero = RunOptions(name="r", engine="deepspeed")
    assert _elastic.fit(zero, written, process(2), Path("c")) == zero  # loading says why not


@pytest.mark.parametrize(("world_size", "repeated"), [(1, 0), (3, 2), (4, 0), (8, 4)])
def test_every_example_of_an_epoch_is_seen_once(world_size, repeated):
    """Two ranks took five batches of two; others go on, and repeat what is no whole batch."""
    before = [batches_of(rank, 2) for rank in range(2)]
    seen = [tuple(row) for own in before for _ in range(5) for row in next(own).tolist()]
    rest = [batches_of(rank, world_size, batch_size=1) for rank in range(world_size)]
    for own in rest:
        own.continue_from(5, before[0].epoch_examples, batch_size=2, world_size=2)
    left = rest[0].epoch_examples // world_size - rest[0].position
    seen += [tuple(row) for own in rest for _ in range(left) for row in next(own).tolist()]
    assert len(seen) == rest[0].epoch_examples + repeated
    assert len(set(seen)) == rest[0].epoch_examples
    assert rest[0].epoch_examples == (48 if 48 % world_size == 0 else 50 // world_size * world_size)
    follow = [tuple(row) for own in rest for row in next(own).tolist()]
    assert not set(follow) & set(seen)  # another epoch


def test_more_ranks_than_before_draw_numbers_of_their_own(tmp_path):
    options = RunOptions(name="r", seed=7)
    drawn = []
    for rank in (2, 3):
        state = {"position": 0, "epoch_examples": 48, "step": 4}
        _elastic.go_on(batches_of(rank, 4), state, Written(2, 2, 1), options, process(4, rank))
        drawn += [torch.rand(()).item(), random.random()]
    assert len(set(drawn)) == 4
