"""Limits that no clock can count, where a rank really waits; and none at all."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import deepytorch
from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import rank_store, spawn_ranks

YEAR = timedelta(days=365)
LATE_S = 0.1


def late(rank: int) -> None:
    if rank == 1:
        time.sleep(LATE_S)


def exchange(rank: int, group: Any) -> list[float]:
    """Each kind of wait, with a rank that comes late to it."""
    found = []
    late(rank)  # to the first meeting
    data = torch.ones(3)
    dist.all_reduce(data, group=group)
    late(rank)
    work = dist.all_reduce(data, group=group, async_op=True)
    assert work is not None
    work.wait(290 * YEAR)
    found.append(data.sum().item())
    late(rank)
    if rank == 1:
        dist.send(data, dst=0, group=group)
    else:
        dist.recv(data, src=1, group=group)
    late(rank)
    dist.all_reduce(data, group=group)
    found.append(data.sum().item())
    late(rank)
    dist.barrier(group=group)
    return found


def endless(rank: int, world_size: int, collectives: str) -> list[list[float]]:
    deepytorch.activate(collectives=collectives)
    found = []
    for number, limit in enumerate([timedelta.max, 300 * YEAR]):
        dist.init_process_group(
            "gloo" if collectives == "auto" else "deepytorch",
            store=rank_store(f"job/{number}"),
            rank=rank,
            world_size=world_size,
            timeout=limit,
        )
        assert serving_name() == "deepytorch"
        found.append(exchange(rank, dist.new_group(timeout=limit)))
        c10d._set_pg_timeout(limit)
        found.append(exchange(rank, None))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("collectives", ["auto", "stock"])
def test_a_limit_that_overflows_is_no_immediate_one(collectives: str) -> None:
    results = spawn_ranks(endless, 2, collectives, fresh=True, timeout_s=200)
    assert results == [[[12.0, 24.0]] * 4] * 2


def none_at_all(rank: int, world_size: int) -> list[str]:
    found = []
    deepytorch.activate()
    for number, limit in enumerate([timedelta(0), timedelta(microseconds=900), -YEAR]):
        for name in ("gloo", "deepytorch"):
            with pytest.raises(RuntimeError) as error:
                dist.init_process_group(
                    name,
                    store=rank_store(f"none/{number}/{name}"),
                    rank=rank,
                    world_size=world_size,
                    timeout=limit,
                )
            found.append(str(error.value))
    return found


def test_no_time_at_all_is_refused_at_the_start() -> None:
    for messages in spawn_ranks(none_at_all, 2, fresh=True):
        assert len(messages) == 6
        assert all("give a timeout of at least 1 ms" in message for message in messages), messages
