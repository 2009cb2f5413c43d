"""Compiled models over several ranks: under DDP and FSDP2, and with one decision for all."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.base import decisions
from deepytorch_core.compile import policies, timeouts
from deepytorch_core.compile.life import step_count, subject
from deepytorch_core.compile.policies import Policy, register_policy
from deepytorch_core.testing import spawn_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(5))
        self.outward = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.outward(x)


def wrapped(model: nn.Module, way: str) -> nn.Module:
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def train(
    model: nn.Module, rank: int, steps: int = 3, clock: Any = None, pause_s: float = 0.0
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if clock is not None:
            clock.step()
        time.sleep(pause_s)
    return losses


def train_both(rank: int, world_size: int, before: bool) -> list[tuple[Any, ...]]:
    found = []
    for way in ("ddp", "fsdp2"):
        torch.manual_seed(0)
        model = Stack()
        expected = train(wrapped(copy.deepcopy(model), way), rank)
        if before:
            deepytorch.compile(model, "aot-eager")
        ours = wrapped(model, way)
        if not before:
            deepytorch.compile(ours, "aot-eager")
        losses = train(ours, rank)
        compiled = engine.compilation_of(model if before else ours)
        assert compiled is not None
        (region,) = compiled.regions
        found.append((losses, expected, len(region.region.modules), region.failure))
        engine.undo_all()
        torch._dynamo.reset()
    return found


@pytest.mark.parametrize("before", [True, False], ids=["compiled first", "wrapped first"])
def test_compile_below_the_hooks_of_ddp_and_fsdp2(before: bool) -> None:
    for rank in spawn_ranks(train_both, 2, before, backend="gloo"):
        for losses, expected, num_blocks, failure in rank:
            assert losses == pytest.approx(expected, rel=1e-5)
            assert (num_blocks, failure) == (5, None)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 700))
        self.outward = nn.Linear(700, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(self.layers(x).sin())


def train_cut(rank: int, world_size: int, policy: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    stock = nn.parallel.DistributedDataParallel(Wide(), bucket_cap_mb=1)
    ours = nn.parallel.DistributedDataParallel(copy.deepcopy(stock.module), bucket_cap_mb=1)
    deepytorch.compile(ours, policy)
    expected, losses = train(stock, rank, steps=4), train(ours, rank, steps=4)
    compiled = engine.compilation_of(ours)
    assert compiled is not None
    (region,) = compiled.regions
    told = region.told
    engine.undo_all()
    torch._dynamo.reset()
    return losses, expected, told.chosen, told.breaks, region.failure


@pytest.mark.parametrize(
    "policy", ["aot-eager", pytest.param("inductor", marks=pytest.mark.extended)]
)
def test_compile_a_graph_that_ddp_cuts_into_its_buckets(policy: str) -> None:
    ranks = spawn_ranks(train_cut, 2, policy, backend="gloo")
    for losses, expected, chosen, breaks, failure in ranks:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert failure is None
        assert set(chosen) == {policy}
        assert chosen[policy] > 1
        assert not breaks


class Counting(Policy):
    name = "counting"

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        return graph.forward


class FailsOnOne(Policy):
    name = "fails-on-one"

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("only here")
        return graph.forward


class Clock:
    """Seconds of a step, by rank and by whether it is compiled."""

    def __init__(self, model: nn.Module, eager_s: float, compiled_s: float) -> None:
        self.now = 0.0
        self.model = model
        self.eager_s = eager_s
        self.compiled_s = compiled_s

    def perf_counter(self) -> float:
        return self.now

    def step(self) -> None:
        found = engine.compilation_of(self.model)
        is_on = found is not None and found.is_on
        self.now += self.compiled_s if is_on else self.eager_s


def decide(rank: int, world_size: int) -> list[tuple[str, str]]:
    decisions._made.clear()
    register_policy(Counting)
    register_policy(FailsOnOne)
    real, automatic = step_count.time, policies.automatic
    found = []
    # Faster on one rank, slower on the other: slower.
    for policy, compiled_s in (("counting", (0.5, 0.6)), ("counting", (0.5, 1.4)), FAILING):
        torch.manual_seed(0)
        model = wrapped(Stack(), "ddp")
        policies.automatic = lambda device, policy=policy: [policies.get(policy)]
        step_count.time = Clock(model, 1.0, compiled_s[rank])  # type: ignore[assignment]
        deepytorch.compile(model)
        train(model, rank, steps=40, clock=step_count.time, pause_s=0.01)
        decision = decisions.made()[-1]
        found.append((decision["chosen"], decision["reason"]))
        engine.undo_all()
        torch._dynamo.reset()
    step_count.time, policies.automatic = real, automatic
    return found


FAILING = ("fails-on-one", (0.5, 0.5))


def test_compile_ranks_decide_alike(tmp_path: Path) -> None:
    environment = {
        "DEEPYTORCH_PATIENCE": "off",
        "DEEPYTORCH_TUNE": "force",  # the same model three times
        "DEEPYTORCH_PROFILE": str(tmp_path / "profile.json"),
        "DEEPYTORCH_LOG": "error",
    }
    both = spawn_ranks(decide, 2, backend="gloo", env=environment)
    assert both[0] == both[1]
    assert both[0] == [
        ("counting", "faster than eager"),
        ("eager", "eager is faster"),
        ("eager", "nothing of it could be compiled"),
    ]


def leave_early(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Rank 1 trains for five steps, rank 0 on; their models are their own."""
    decisions._made.clear()
    register_policy(Counting)
    subject.RANKS_LIMIT_S = 0.3
    policies.automatic = lambda device: [policies.get("counting")]
    model = Stack()
    deepytorch.compile(model)
    train(model, rank, steps=40 if rank == 0 else 5, pause_s=0.02)
    dist.barrier()
    return [(decision["chosen"], decision["reason"]) for decision in decisions.made()]


def test_compile_a_rank_that_leaves_costs_the_others_a_time_limit_and_no_more() -> None:
    environment = {
        "DEEPYTORCH_PATIENCE": "off",
        "DEEPYTORCH_TUNE": "force",
        "DEEPYTORCH_LOG": "error",
    }
    first, second = spawn_ranks(leave_early, 2, backend="gloo", env=environment)
    assert first == [("eager", "rank 1 did not come within 0.3 s")]
    assert second == []


def hold(rank: int, world_size: int) -> list[timedelta]:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    limits = [backend.options._timeout]
    lower = timeouts.hold_off(100)
    limits.append(backend.options._timeout)
    of_another_model = timeouts.hold_off(50)
    limits.append(backend.options._timeout)
    lower()
    lower()
    limits.append(backend.options._timeout)
    of_another_model()
    limits.append(backend.options._timeout)
    own = limits[0] + timedelta(seconds=7)
    lower = timeouts.hold_off(100)
    _limit_of(backend)(own)  # the program's
    lower()
    return [*limits, backend.options._timeout]


class Sleeps(Policy):
    """Takes longer on rank 1 than `LIMIT_S` allows, once where it is told to."""

    name = "sleeps"
    is_slow = True

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        if self.is_slow and dist.get_rank() == 1:
            time.sleep(1.5 * LIMIT_S)
            type(self).is_slow = False
        return graph.forward


LIMIT_S = 3.0


def compile_both_late(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    register_policy(Sleeps)
    decisions._made.clear()
    return [compile_late(rank, policy) for policy in ("sleeps", "auto")]


def compile_late(rank: int, policy: str) -> tuple[Any, ...]:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    own = backend.options._timeout
    model = wrapped(Stack(), "ddp")
    if policy == "auto":
        measure_fast(model)
    dist.barrier()
    _limit_of(backend)(timedelta(seconds=LIMIT_S))
    limits = [backend.options._timeout.total_seconds()]
    deepytorch.compile(model, policy, budget_s=30)
    if policy == "auto":
        train(model, rank, steps=1)  # in which the ranks tell each other of their profiles
    losses = train(model, rank, steps=1)
    (region,) = engine.compilation_of(model).regions  # type: ignore[union-attr]
    limits.append(backend.options._timeout.total_seconds())
    train(model, rank, steps=timeouts.HELD_STEPS)
    limits.append(backend.options._timeout.total_seconds())
    # Another size, long after all is decided: it is slow again.
    model(torch.randn(7, 8)).square().mean().backward()
    limits.append(backend.options._timeout.total_seconds())
    engine.undo_all()
    limits.append(backend.options._timeout.total_seconds())
    torch._dynamo.reset()
    _limit_of(backend)(own)
    reason = decisions.made()[-1]["reason"]
    return limits, reason, region.told.num_compiles, region.failure, losses


def measure_fast(model: nn.Module) -> None:
    """Let the profile know that "sleeps" is faster."""
    real, automatic = step_count.time, policies.automatic
    policies.automatic = lambda device: [policies.get("sleeps")]
    step_count.time = Clock(model, 1.0, 0.5)  # type: ignore[assignment]
    Sleeps.is_slow = False
    deepytorch.compile(model)
    train(model, dist.get_rank(), steps=40, clock=step_count.time, pause_s=0.01)
    assert decisions.made()[-1]["chosen"] == "sleeps", decisions.made()
    engine.undo_all()
    torch._dynamo.reset()
    step_count.time, policies.automatic = real, automatic
    Sleeps.is_slow = True


def test_compile_longer_than_a_time_limit_on_one_rank(tmp_path: Path) -> None:
    environment = {
        "DEEPYTORCH_PATIENCE": "off",
        "DEEPYTORCH_TUNE": "auto",
        "DEEPYTORCH_PROFILE": str(tmp_path / "profile.json"),
        "DEEPYTORCH_LOG": "error",
    }
    for rank in spawn_ranks(compile_both_late, 2, backend="gloo", env=environment, timeout_s=180):
        assert [reason for _, reason, *_ in rank] == ["asked for", "from the profile"]
        for limits, _, num_compiles, failure, losses in rank:
            assert limits == [LIMIT_S, LIMIT_S + 30, LIMIT_S, LIMIT_S + 30, LIMIT_S]
            assert num_compiles >= 2
            assert failure is None
            assert len(losses) == 1


def _limit_of(backend: Any) -> Callable[[timedelta], None]:
    setter: Callable[[timedelta], None] = getattr(backend, "set_timeout", None)
    return setter or backend._set_default_timeout


@pytest.mark.parametrize("backend", ["gloo", "deepytorch"])
def test_compile_time_limits_are_held_off_and_come_back(backend: str) -> None:
    for before, *others in spawn_ranks(hold, 2, backend=backend):
        assert [(other - before).total_seconds() for other in others] == [100, 100, 50, 0, 7]
