"""Every rank's report says who begins the stock backend's collectives last."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import deepytorch
from deepytorch_core.hang.starts import Starts
from deepytorch_core.testing import spawn_ranks

LATE, LAG_S, CALLS = 1, 0.02, 25


def come_late(rank: int, world_size: int) -> tuple[tuple[Starts, ...], str]:
    """Pairs of ranks have a group each, in which nobody is late on purpose."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for _ in range(CALLS):
        time.sleep(LAG_S * (rank == LATE))
        dist.all_reduce(torch.ones(33))
        dist.barrier()
    for ranks, group in zip(([0, 1], [1, 2]), pairs, strict=True):
        if rank in ranks:
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    found = deepytorch.report()
    dist.barrier()  # a rank that has ended has no record
    return found.starts, str(found)


@pytest.mark.parametrize("collectives", ["stock", "native"])
def test_who_comes_late_is_named(collectives: str) -> None:
    environment = {"DEEPYTORCH_COLLECTIVES": collectives, "DEEPYTORCH_TUNE": "off"}
    for found, text in spawn_ranks(come_late, 3, backend="deepytorch", env=environment):
        if collectives == "native":  # that is in `waiting`
            assert not found
            assert "starts:" not in text
            continue
        world, *pairs = found
        assert world.operations == 2 * CALLS + 1
        assert world.latest == LATE
        assert CALLS - 2 <= world.times_last <= world.operations
        assert [pair.operations for pair in pairs] == [1] * len(pairs)
        # Half of them are the barriers, where it is as late as it is by chance.
        late = world.times_last <= CALLS + 2 and 2 * world.times_last > world.operations
        assert ("rank 1 was the last of this node to begin" in text) is late or not late
