"""A run's report says of its ranks who waited how long, and in which way the waiting was done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import deepytorch
from deepytorch_core.testing import spawn_ranks

# Long enough for a rank that is late itself, on a busy machine, to wait for most of it.
STEPS, DELAY_S = 4, 0.15
WAYS = ("synchronous", "waited for", "reducer", "delegated", "delegated reducer")


def step_of(way: str) -> Callable[[], object]:
    """A step with a collective; those of sparse tensors are the stock backend's."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = DistributedDataParallel(model) if "reducer" in way else None

    def start(is_async: bool) -> Any:
        value = torch.ones(64)
        if way.startswith("delegated"):
            value = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (64,))
        return dist.all_reduce(value, async_op=is_async)

    if way == "delegated reducer":
        assert wrapped is not None

        def by_stock(_, bucket):  # annotations as text are refused
            return start(is_async=True).get_future().then(lambda _: bucket.buffer())

        wrapped.register_comm_hook(None, by_stock)

    def step() -> None:
        optimizer.zero_grad()
        (model if wrapped is None else wrapped)(torch.ones(2, 8)).sum().backward()
        if way in ("synchronous", "delegated"):
            start(is_async=False)
        elif way == "waited for":
            start(is_async=True).wait()
        optimizer.step()

    return step


def run_steps(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for way in WAYS:
        step = step_of(way)
        step()
        before = deepytorch.report()
        for _ in range(STEPS):
            if rank == 1:
                time.sleep(DELAY_S)
            step()
        after = deepytorch.report()
        found[way] = {
            "steps": after.course["steps"] - before.course["steps"],
            "exposed_s": after.course["exposed_s"] - before.course["exposed_s"],
            "held_s": after.course["held_s"] - before.course["held_s"],
            "delegated": after.delegated_calls - before.delegated_calls,
        }
    return found


def test_waiting_is_exposed_however_it_is_done() -> None:
    # Fresh, here and below: importing deepytorch activates it, which only a first import does.
    first, second = spawn_ranks(run_steps, 2, backend="deepytorch", fresh=True)
    planted_s = STEPS * DELAY_S
    for way in WAYS:
        assert first[way]["steps"] == second[way]["steps"] == STEPS
        assert (first[way]["delegated"] >= STEPS) == way.startswith("delegated"), way
        # Rank 0 can do nothing but wait while rank 1 sleeps.
        assert first[way]["exposed_s"] >= 0.5 * planted_s, way
        assert second[way]["exposed_s"] < first[way]["exposed_s"], way
        if not way.startswith("delegated"):
            assert second[way]["held_s"] >= 0.5 * planted_s, way


def hidden(rank: int, world_size: int) -> float:
    """Collectives that ended long before anybody asked."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.0)
    for _ in range(2):
        dist.all_reduce(torch.ones(64))
        optimizer.step()
    before = deepytorch.report().course["exposed_s"]
    for _ in range(STEPS):
        work = dist.all_reduce(torch.ones(64), async_op=True)
        time.sleep(DELAY_S)  # as if it computed
        work.wait()
        optimizer.step()
    return deepytorch.report().course["exposed_s"] - before


def test_what_runs_beside_computation_is_not_exposed() -> None:
    for exposed_s in spawn_ranks(hidden, 2, backend="deepytorch", fresh=True):
        assert exposed_s < STEPS * DELAY_S


def failing(rank: int, world_size: int) -> int:
    before = deepytorch.report().failures
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(torch.ones(4 + rank))
    return deepytorch.report().failures - before


def test_failed_operations_are_counted() -> None:
    assert spawn_ranks(failing, 2, backend="deepytorch", fresh=True) == [1, 1]
