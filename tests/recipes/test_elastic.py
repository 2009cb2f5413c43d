# SPDX-License-Identifier: Apache-2.0
"""Going on with another number of processes: which examples, in how many micro-batches.

tests/faults/check_resize.py trains so.
"""

import random
from pathlib import Path

import pytest
import torch

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process
from deepytorch.recipes.data.batches import EndlessBatches
from deepytorch.recipes.runner import elastic
from deepytorch.recipes.runner.checkpoint import Written

EXAMPLES = 50


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


def process(world_size, rank=0):
    return Process(rank, world_size, torch.device("cpu"))


def test_steps_stay_as_large():
    options = RunOptions(name="r", batch_size=4, accumulation=1)
    written = Written(4, batch_size=4, accumulation=2)
    for world_size, accumulation in ((1, 8), (2, 4), (8, 1)):
        fitted = elastic.fit(options, written, process(world_size), Path("c"))
        assert fitted.accumulation == accumulation
    assert elastic.fit(options, written, process(4), Path("c")) == options
    with pytest.raises(RecipeError, match="4 wrote it, with 32 examples in each step"):
        elastic.fit(options, written, process(3), Path("c"))
    with pytest.raises(RecipeError, match="an unknown number of examples"):
        elastic.fit(options, Written(4), process(2), Path("c"))
    zero = RunOptions(name="r", engine="deepspeed")
    assert elastic.fit(zero, written, process(2), Path("c")) == zero  # loading says why not


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


def test_data_that_shrank_is_refused():
    batches = batches_of(0, 2)
    batches.continue_from(random.randrange(99), EXAMPLES, batch_size=2, world_size=1)
    with pytest.raises(
        RecipeError, match=f"the data has {EXAMPLES} examples, and an epoch of .* 54"
    ):
        batches.continue_from(random.randrange(99), 54, batch_size=2, world_size=1)


def test_more_ranks_than_before_draw_numbers_of_their_own(tmp_path):
    options = RunOptions(name="r", seed=7)
    drawn = []
    for rank in (2, 3):
        state = {"position": 0, "epoch_examples": 48, "step": 4}
        elastic.go_on(batches_of(rank, 4), state, Written(2, 2, 1), options, process(4, rank))
        drawn += [torch.rand(()).item(), random.random()]
    assert len(set(drawn)) == 4
