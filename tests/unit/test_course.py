"""Steps and what goes by between them, by a clock and counters of the test's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import deepytorch
from deepytorch_core.metering import step_timer
from deepytorch_core.metering.step_timer import Counters, Course
from deepytorch_core.report import live


class Clock:
    """Time that passes only where the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1e6

    def thread_time(self) -> float:
        return 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(step_timer, "time", made)
    monkeypatch.setattr(live, "time", made)
    return made


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return what the counters say; the test adds to it."""
    values = dict.fromkeys(("exposed_s", "waited_s", "held_s", "data_s", "tuning_s"), 0.0)
    monkeypatch.setattr(step_timer, "counters", lambda: Counters(**values))
    monkeypatch.setattr(
        step_timer, "_clocks", lambda: (values["exposed_s"], values["data_s"], values["tuning_s"])
    )
    monkeypatch.delitem(sys.modules, "deepytorch_c10d", raising=False)
    return values


class Optimizer:
    """As a hook of torch's sees it: parts are stepped on one after the other, as ZeRO-3 does."""

    def __init__(self, parts: int = 1) -> None:
        self.parts = [[object()] for _ in range(parts)]
        self.param_groups: list[dict[str, Any]] = []

    def step(self, seen: Course) -> None:
        for part in self.parts:
            self.param_groups = [{"params": part}]
            seen.stepped(self)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.usefixtures("clock", "spent")
def test_a_step_is_over_when_the_same_parameters_are_stepped_on(
    parts: int, optimizers: int
) -> None:
    seen = Course()
    several = [Optimizer(parts) for _ in range(optimizers)]
    for _ in range(7):
        for optimizer in several:
            optimizer.step(seen)
    assert seen.steps == 7


def test_buckets_hold_what_went_by(clock: Clock, spent: dict[str, float]) -> None:
    seen, optimizer = Course(), Optimizer()
    clock.now += 50.0  # before the first step's end nothing is timed
    optimizer.step(seen)
    for step in range(10):
        clock.now += 0.1
        spent["exposed_s"] += 0.01
        spent["waited_s"] += 0.02 if step < 5 else 0.0
        optimizer.step(seen)
    found = seen.report()
    assert (found["steps"], found["timed_steps"]) == (11, 10)
    assert found["seconds"] == pytest.approx(1.0)
    assert found["exposed_s"] == pytest.approx(0.1)
    assert found["start_s"] == pytest.approx(1e6 + 150.0)
    assert [bucket["steps"] for bucket in found["buckets"]] == [3, 3, 3, 1]
    assert found["buckets"][0]["waited_s"] == pytest.approx(0.06)
    assert found["buckets"][2]["waited_s"] == 0.0
    assert found["buckets"][1]["start_s"] == pytest.approx(1e6 + 150.3)


def test_a_long_run_has_few_buckets_and_loses_nothing(
    clock: Clock, spent: dict[str, float]
) -> None:
    seen, optimizer = Course(), Optimizer()
    optimizer.step(seen)
    for _ in range(3000):
        clock.now += 0.5
        spent["data_s"] += 0.25
        optimizer.step(seen)
    found = seen.report()
    assert len(found["buckets"]) <= 120
    assert sum(bucket["steps"] for bucket in found["buckets"]) == found["timed_steps"] == 3000
    assert found["data_s"] == pytest.approx(750.0)
    ends = [bucket["start_s"] + bucket["seconds"] for bucket in found["buckets"]]
    assert ends[:-1] == pytest.approx([bucket["start_s"] for bucket in found["buckets"][1:]])


def test_what_lies_between_two_activations_is_nobodys(
    clock: Clock, spent: dict[str, float]
) -> None:
    seen, optimizer = Course(), Optimizer()
    for _ in range(2):
        for _ in range(3):
            clock.now += 1.0
            optimizer.step(seen)
        seen.pause()
        clock.now += 1000.0
        spent["exposed_s"] += 1000.0
    found = seen.report()
    assert (found["steps"], found["timed_steps"], found["seconds"]) == (6, 4, 4.0)
    assert found["exposed_s"] == 0.0


@pytest.mark.usefixtures("clock", "spent")
@pytest.mark.parametrize("paused", [False, True])
def test_what_comes_after_the_last_step_is_no_steps(
    clock: Clock, spent: dict[str, float], paused: bool
) -> None:
    seen, optimizer = Course(), Optimizer()
    for _ in range(3):
        clock.now += 0.01
        spent["exposed_s"] += 0.002
        spent["waited_s"] += 0.001
        optimizer.step(seen)
    clock.now += 5.0
    for name in spent:
        spent[name] += 4.0
    if paused:
        seen.pause()
    found = seen.report()
    assert found["seconds"] == pytest.approx(0.02)
    assert found["exposed_s"] == pytest.approx(0.004)
    assert found["waited_s"] <= found["exposed_s"]
    assert (found["data_s"], found["tuning_s"]) == (0.0, 0.0)


def test_of_very_many_losses_some_are_kept() -> None:
    seen = Course()
    for step in range(10_000):
        seen.note_loss(float(step), step)
    found = seen.report()["losses"]
    assert 200 <= len(found) < 500
    steps = [step for step, _ in found]
    assert len({after - before for before, after in zip(steps, steps[1:], strict=False)}) == 1
    assert steps[0] == 0
    assert all(step == loss for step, loss in found)


def test_counters_never_go_back() -> None:
    assert Counters(exposed_s=1.0, data_s=5.0).since(Counters(exposed_s=3.0, data_s=2.0)) == (
        Counters(data_s=3.0)
    )


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[Course]:
    """Activated, with a course of its own."""
    was_active = deepytorch.is_active()
    deepytorch.deactivate()
    made = Course()
    monkeypatch.setattr(step_timer, "_course", made)
    deepytorch.activate()
    yield made
    deepytorch.deactivate()
    if was_active:
        deepytorch.activate()


def test_torchs_own_optimizers_are_counted_until_deactivation(active: Course) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    for _ in range(4):
        weight.grad = torch.ones(3)
        optimizer.step()
    assert deepytorch.report().course["steps"] == active.steps == 4
    deepytorch.deactivate()
    optimizer.step()
    assert active.steps == 4


class Wrapping(torch.optim.SGD):
    """As wrappers of gradients' reductions are made: hooks are called for its base's step, too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_within_a_step_is_none(active: Course) -> None:
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    torch.optim.SGD(weights)  # from now on SGD's own step calls hooks
    hooks = []
    optimizer = Wrapping(weights, lr=0.1)
    handle = register_optimizer_step_post_hook(lambda *_: hooks.append(active.steps))
    for _ in range(3):
        optimizer.step()
    handle.remove()
    assert len(hooks) == 6
    assert active.steps == 3


def test_the_hook_breaks_no_graph(active: Course) -> None:
    """Call the hook in a compiled step, as torch does there, too."""

    @torch.compile(fullgraph=True, backend="eager")
    def doubled(value: torch.Tensor) -> torch.Tensor:
        step_timer._stepped(None, (), {})
        return value * 2

    assert doubled(torch.ones(3)).tolist() == [2.0] * 3
    assert active.steps == 0


def test_figures_are_of_the_steps_since_the_last_call(
    clock: Clock, spent: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, optimizer = Course(), Optimizer()
    monkeypatch.setattr(step_timer, "_course", seen)
    rows = [
        {"algorithm": "one_shot", "calls": 10, "bytes": 1e6},
        {"algorithm": "delegate", "calls": 10, "bytes": 1e6},
    ]
    ranks = [{"rank": 4, "cost_us": 1e6}, {"rank": 5, "cost_us": 9e6}]
    core = SimpleNamespace(statistics=lambda: rows, arrivals=lambda: [{"ranks": ranks}])
    monkeypatch.setitem(sys.modules, "deepytorch_core._core", core)
    figures = live.Figures()
    clock.now += 1.0
    assert figures.take() == {}, "no step"
    for _ in range(4):
        clock.now += 0.5
        optimizer.step(seen)
    rows[0] = {"algorithm": "one_shot", "calls": 22, "bytes": 9e6}
    rows[1] = {"algorithm": "delegate", "calls": 14, "bytes": 1e6}
    ranks[0] = {"rank": 4, "cost_us": 1.5e6}
    spent.update(exposed_s=0.2, data_s=0.1, waited_s=0.4)
    assert figures.take() == {
        "deepytorch/step_ms": 500.0,
        "deepytorch/exposed_share": 0.1,
        "deepytorch/data_share": 0.05,
        "deepytorch/operations": 4.0,
        "deepytorch/mbytes": 2.0,
        "deepytorch/native_share": 0.75,
        "deepytorch/waited_share": 0.2,
        "deepytorch/straggler": 4.0,
        "deepytorch/straggler_share": 0.25,
    }
    assert figures.take() == {}


@pytest.mark.usefixtures("clock", "spent")
def test_the_loss_is_found_among_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Course()
    monkeypatch.setattr(step_timer, "_course", seen)
    live.logged({"loss": 1.5, "epoch": 0.1}, 10)
    live.logged({"train_loss": 2}, 20)
    live.logged({"accuracy": 0.5, "loss": "nan"}, 30)
    assert seen.report()["losses"] == [[10, 1.5], [20, 2.0]]
