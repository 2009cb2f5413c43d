"""Ranks that don't train alike under what nobody asked for: no rank waits for another's decision.

Each of these would stand still for the two minutes that a rank may take to answer; what it may take
here is less.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deepytorch
from deepytorch_core.base import decisions
from deepytorch_core.c10d import activation
from deepytorch_core.compile import policies
from deepytorch_core.compile.life import subject
from deepytorch_core.testing import spawn_ranks

LIMIT_S = 50.0
STEPS = 40


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def switch_on(folder: str) -> None:
    """Do what one line does to a script that knows nothing of it; the policy costs little."""
    profile = f"{folder}/profile.json"
    activation.leave_models_alone(False)
    deepytorch.activate(tune="auto", profile=profile, patience="off", log="error")
    policies.automatic = lambda device: [policies.get("aot-eager")]
    assert subject.RANKS_LIMIT_S > 2 * LIMIT_S


def train(net: nn.Module, rank: int, steps: int = STEPS, extra: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(steps):
        if extra is not None and step % 5 == 0:
            extra()
        loss = net(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def passes_of_one_rank(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    """Rank 0 looks at the bare model now and then: with gradients, and in evaluation."""
    expected = train(DistributedDataParallel(model()), rank)
    switch_on(folder)
    ours = DistributedDataParallel(model())

    def look() -> None:
        if rank == 0:
            x = torch.ones(1, 8, requires_grad=True)
            torch.autograd.grad(ours.module(x).sum(), x)
            with torch.no_grad():
                ours.module(x)

    return expected, train(ours, rank, extra=look)


def uneven_batches(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    steps = 4 if rank == 0 else STEPS
    found = []
    for arm in ("stock", "ours"):
        if arm == "ours":
            switch_on(folder)
        net = DistributedDataParallel(model())
        with net.join():
            found.append(train(net, rank, steps))
    return found[0], found[1]


def a_model_of_one_rank(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    """Rank 0 trains by itself; the others wait for it."""
    import deepytorch

    expected: list[float] = []
    losses: list[float] = []
    if rank == 0:
        expected = train(model(), rank)
    switch_on(folder)
    if rank == 0:
        losses = train(deepytorch.compile(model()), rank)
    dist.barrier()
    return expected, losses


@pytest.mark.parametrize("act", [passes_of_one_rank, uneven_batches, a_model_of_one_rank])
def test_ranks_that_do_not_train_alike_do_not_wait(act: Any, tmp_path: Any) -> None:
    env = {"DEEPYTORCH_TUNE": "force"}
    ranks = spawn_ranks(
        act, 2, str(tmp_path), backend="gloo", env=env, fresh=True, timeout_s=LIMIT_S
    )
    for expected, losses in ranks:
        assert losses == pytest.approx(expected, rel=1e-4)


def a_group_of_its_own(rank: int, world_size: int, folder: str) -> list[str]:
    """Two of three ranks train together; those two decide."""
    switch_on(folder)
    pair = dist.new_group([0, 1])
    if rank < 2:
        losses = train(DistributedDataParallel(model(), process_group=pair), rank, 3 * STEPS)
        assert losses[-1] < losses[0]
    dist.barrier()
    return [
        decision["chosen"]
        for decision in decisions.made()
        if decision["what"].startswith("compile of")
    ]


def test_the_ranks_of_a_models_group_decide(tmp_path: Any) -> None:
    env = {"DEEPYTORCH_TUNE": "force"}
    first, second, third = spawn_ranks(
        a_group_of_its_own,
        3,
        str(tmp_path),
        backend="gloo",
        env=env,
        fresh=True,
        timeout_s=LIMIT_S,
    )
    assert len(first) == 1
    assert first == second
    assert third == []
