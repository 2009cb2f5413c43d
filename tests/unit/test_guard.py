"""The guard: state comes back, numbers are compared, only what wins stays, decisions are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepytorch_core import guard
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.guard import Candidate, Trial, timing

pytestmark = pytest.mark.usefixtures("quiet_profile")


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


class Swapped:
    """A candidate that replaces `module.forward`."""

    def __init__(self, module: nn.Module, make: Callable[..., Any]) -> None:
        self.module = module
        self.make = make
        self.log: list[str] = []

    def apply(self) -> None:
        self.log.append("apply")
        self.module.forward = self.make(type(self.module).forward.__get__(self.module))

    def undo(self) -> None:
        self.log.append("undo")
        vars(self.module).pop("forward", None)

    def named(self, name: str) -> Candidate:
        return Candidate(name, self.apply, self.undo)


def test_guard_puts_state_back() -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    grad = model[0].weight.grad
    mean = model[1].running_mean
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    with guard.preserved(model, scaler=scaler):
        assert model[0].weight.grad is None
        scaler.scale(model(torch.randn(4, 8)).sum()).backward()
        scaler._scale.fill_(3.0)
        model.eval()
        model[1].running_mean = torch.zeros(8)
        random.random()
        np.random.rand()
    assert model[0].weight.grad is grad
    assert torch.equal(grad, torch.ones_like(grad))
    assert model[2].weight is None if hasattr(model[2], "weight") else True
    assert all(parameter.grad is None for parameter in list(model.parameters())[1:])
    assert model.training
    assert model[1].running_mean is mean
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert scaler._scale is None or float(scaler._scale) == 8.0
    after = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert after == (torch.rand(1).item(), random.random(), np.random.rand())


def test_guard_trials_stay_out_of_checkpointing() -> None:
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(1) or x, lambda x: x):
        with guard.no_saved_tensor_hooks():
            (torch.ones(2, requires_grad=True) ** 2).sum().backward()
        assert not packed
        (torch.ones(2, requires_grad=True) ** 2).sum()
    assert packed


def test_guard_dropout_off_keeps_batch_statistics() -> None:
    model = network()
    with guard.dropout_off(model):
        model(torch.randn(4, 8))
        assert not model[2].training
    assert model[1].num_batches_tracked == 1
    assert model[2].training


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_guard_tolerance_goes_by_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(37, 5, dtype=dtype, generator=generator)
    real = dtype.to_real() if dtype.is_complex else dtype
    limit = guard.numerics.TOLERANCES[real]
    assert guard.difference(a, a.clone()) is None
    near = (a.to(torch.complex128 if dtype.is_complex else torch.float64) * (1 + limit / 4)).to(
        dtype
    )
    assert guard.difference([a], [near]) is None
    # One wrong element among many.
    wrong = a.clone()
    wrong[3, 2] += 10 * limit * float(a.abs().max())
    assert "at worst" in str(guard.difference({"a": a}, {"a": wrong}))
    far = guard.norm(a - wrong)
    assert guard.difference(a, wrong, negligible=far * 1.01) is None
    assert "at worst" in str(guard.difference(a, wrong, negligible=far * 0.99))
    assert guard.difference(a, near, dtype=torch.bfloat16) is None


def test_guard_sees_what_is_not_the_same() -> None:
    a = torch.ones(3)
    assert "in place of" in str(guard.difference(a, a.double()))
    assert "in place of" in str(guard.difference(a, a[:2]))
    assert "2 tensors in place of 1" in str(guard.difference(a, [a, a]))
    assert "infinite" in str(guard.difference(a, a / 0, negligible=float("inf")))
    assert guard.difference(a / 0, a / 0) is None
    assert "not equal" in str(guard.difference(torch.arange(3), torch.arange(3) + 1))
    assert guard.difference([None, a], [None, a]) is None
    assert "nothing" in str(guard.difference([a], [None]))


def test_faster_is_beyond_the_noise_of_both_in_the_guard() -> None:
    steady, noisy = [1.0] * 6, [0.6, 0.8, 0.98, 1.0, 1.2, 1.4]
    assert timing.is_faster([0.9] * 6, steady)
    assert not timing.is_faster([0.99] * 6, steady)
    assert not timing.is_faster([0.9] * 6, noisy)
    assert not timing.is_faster(steady, steady)
    # Steps that did not count.
    assert timing.is_faster([0.9] * 4 + [math.inf] * 2, steady)
    assert not timing.is_faster([0.5] + [math.inf] * 5, steady)
    assert not timing.is_faster(steady, [math.inf] * 6)


def test_guard_takes_arms_in_turns() -> None:
    order: list[str] = []
    arms = {name: lambda name=name: order.append(name) or time.sleep(0.002) for name in "ab"}
    samples = timing.interleaved(arms, torch.device("cpu"), rounds=4)
    assert [len(row) for row in samples.values()] == [4, 4]
    assert "".join(order) == "aabb" + "abbaabba"
    few = timing.interleaved(arms, torch.device("cpu"), rounds=9, budget_s=1e-9)
    assert [len(row) for row in few.values()] == [2, 2]


class _Slow(nn.Module):
    """Waits as long as `forward` is the class's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x @ self.weight


def _trial(model: nn.Module, inputs: torch.Tensor, **more: Any) -> Trial:
    def run() -> torch.Tensor:
        output = model(inputs)
        output.square().sum().backward()
        return output

    return Trial(module=model, run=run, **more)


def _fast(stock: Any) -> Any:
    return lambda x: x @ stock.__self__.weight


def _raising(stock: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel\nsecond line")

    return forward


def test_guard_keeps_the_fastest_that_is_right(quiet_profile: Path) -> None:
    model = _Slow()
    tried = {
        "fast": Swapped(model, _fast),
        "wrong": Swapped(model, lambda stock: lambda x: x @ stock.__self__.weight * 1.01),
        "wrong gradient": Swapped(
            model, lambda stock: lambda x: x @ stock.__self__.weight.detach() + 0 * x @ model.weight
        ),
        "failing": Swapped(model, _raising),
    }
    candidates = [candidate.named(name) for name, candidate in tried.items()]
    inputs = torch.randn(3, 4)
    decision = guard.choose("a test", candidates, _trial(model, inputs))
    assert decision.chosen == "fast"
    assert decision.times_ms["fast"] < decision.times_ms["stock"]
    assert set(decision.dropped) == {"wrong", "wrong gradient", "failing"}
    assert decision.dropped["failing"] == "RuntimeError: no such kernel"
    assert decision.dropped["wrong gradient"].startswith("gradient")
    assert tried["fast"].log[-1] == "apply"
    assert all(candidate.log[-1] == "undo" for name, candidate in tried.items() if name != "fast")
    assert model.weight.grad is None
    (recorded,) = decisions.made()
    assert recorded["chosen"] == "fast"
    assert "dropped failing: RuntimeError: no such kernel" in decisions.sentence(recorded)
    (entry,) = json.loads(quiet_profile.read_text())["decisions"]
    assert entry["chosen"] == "fast"
    assert entry["for"]["what"] == "a test"
    assert entry["dropped"]["wrong"]


def test_guard_looks_again_where_noise_hides_a_gain(
    quiet_profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = {"stock": [40e-3, 30e-3, 50e-3] * 2, "fast": [30e-3, 20e-3, 40e-3] * 2}
    quiet = {"stock": [40e-3] * 14, "fast": [30e-3] * 14}
    calls = []

    def interleaved(arms: Any, device: Any, **_: Any) -> dict[str, list[float]]:
        calls.append(list(arms))
        return noisy if len(calls) == 1 else quiet

    monkeypatch.setattr(guard, "interleaved", interleaved)
    model = nn.Linear(4, 4)
    same = Swapped(model, lambda stock: stock)
    decision = guard.choose("noisy", [same.named("fast")], _trial(model, torch.randn(2, 4)))
    assert (decision.chosen, len(calls)) == ("fast", 2)
    # If noise stays, stock stays, but a way with another advantage need only be as fast.
    monkeypatch.setattr(guard, "interleaved", lambda *_, **__: noisy)
    for prefer, chosen in ((None, "stock"), ("takes less memory", "fast")):
        vars(model).pop("forward", None)
        same = Swapped(model, lambda stock: stock)
        trial = _trial(model, torch.randn(2, 4))
        decision = guard.choose(f"always {prefer}", [same.named("fast")], trial, prefer=prefer)
        assert decision.chosen == chosen
    assert decision.reason == "no slower than stock, and takes less memory"


def test_guard_forgives_what_a_module_makes_of_rounding(quiet_profile: Path) -> None:
    """A chaotic module: its weights' last bits decide digits of what it gives."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(64, generator=torch.Generator().manual_seed(1)))

        def forward(self, x: torch.Tensor, way: Any = None) -> torch.Tensor:
            state = torch.sigmoid(self.weight + x)
            for _ in range(12):
                state = 3.9 * state * (1 - state)
            return state

    def other_order(stock: Any) -> Any:
        return lambda x: stock(x + 1e-7)

    def wrong(stock: Any) -> Any:
        return lambda x: stock(x * 1.001)

    for change, is_dropped in ((other_order, False), (wrong, True)):
        network = Deep()
        x = torch.rand(64, generator=torch.Generator().manual_seed(2))
        candidate = Swapped(network, change)
        decision = guard.choose(change.__name__, [candidate.named("it")], _trial(network, x))
        assert ("it" in decision.dropped) == is_dropped, decision
        before = torch.rand(64, generator=torch.Generator().manual_seed(1))
        assert torch.equal(network.weight, before)


def test_guard_takes_decisions_from_the_profile(quiet_profile: Path) -> None:
    model = _Slow()
    inputs = torch.randn(3, 4)
    guard.choose("kept", [Swapped(model, _fast).named("fast")], _trial(model, inputs))
    vars(model).pop("forward")
    config.set_current(Options(profile=str(quiet_profile), deterministic=True, log="error"))
    again = Swapped(model, _fast)
    decision = guard.choose("kept", [again.named("fast")], _trial(model, inputs))
    assert (decision.chosen, decision.reason) == ("fast", "from the profile")
    assert again.log == ["apply"]
    # Known, but wrong by now.
    wrong = Swapped(model, lambda stock: lambda x: x @ stock.__self__.weight * 2)
    vars(model).pop("forward")
    decision = guard.choose("kept", [wrong.named("fast")], _trial(model, inputs))
    assert decision.chosen == "stock"
    assert wrong.log == ["apply", "undo"]
    # Another structure is another question, and a deterministic run asks nothing.
    other = network()
    decision = guard.choose("kept", [Swapped(other, _fast).named("fast")], _trial(other, inputs))
    assert decision.reason.startswith("not measured: deterministic")


def test_guard_leaves_stock_where_nothing_wins_or_no_time_is_left() -> None:
    model = nn.Linear(4, 4)
    same = Swapped(model, lambda stock: lambda x: (time.sleep(0.003), stock(x))[1])
    decision = guard.choose("slower", [same.named("same")], _trial(model, torch.randn(2, 4)))
    assert (decision.chosen, decision.reason) == ("stock", "nothing is faster")
    assert same.log[-1] == "undo"
    late = Swapped(model, _fast)
    trial = _trial(model, torch.randn(2, 4), budget_s=-1.0)
    decision = guard.choose("late", [late.named("late")], trial)
    assert decision.dropped["late"].startswith("no time left")
    assert not late.log


def test_guard_drops_what_fails_only_while_timed() -> None:
    model = nn.Linear(4, 4)
    calls = []

    def sometimes(stock: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) > 2:
                raise MemoryError("full")
            return stock(x)

        return forward

    decision = guard.choose(
        "late failure", [Swapped(model, sometimes).named("s")], _trial(model, torch.randn(2, 4))
    )
    assert decision.chosen == "stock"
    assert decision.dropped == {"s": "MemoryError: full"}
    assert "forward" not in vars(model)


@pytest.mark.parametrize("fitting", [0, 1, 2, 4, 7])
def test_guard_leaves_stock_where_memory_is_for_a_step_alone(fitting: int) -> None:
    model = nn.Linear(4, 4)
    trial, calls = _trial(model, torch.randn(2, 4)), []

    def run() -> Any:
        calls.append(1)
        if len(calls) > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return trial.run()

    same = Swapped(model, lambda stock: stock).named("x")
    decision = guard.choose("large", [same], dataclasses.replace(trial, run=run))
    assert (decision.chosen, decision.reason) == ("stock", "no candidate is left")
    assert decision.dropped["x"].startswith("OutOfMemoryError: CUDA out of memory")
    assert "forward" not in vars(model)
    assert model.weight.grad is None


def test_guard_lets_errors_of_the_stock_way_out() -> None:
    model = nn.Linear(4, 4)
    trial = _trial(model, torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="shapes"):
        guard.choose("broken", [Swapped(model, _fast).named("x")], trial)
    with contextlib.suppress(RuntimeError):
        guard.choose("broken", [Swapped(model, _fast).named("x")], trial)
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 1, "decisions": 3}',
        '{"format": 1, "decisions": ["x", {"chosen": "x", "for": "x"}, {"chosen": [], "for": {}}]}',
        '{"format": 1, "decisions": ' + 100_000 * "[",
        '{"format": 99}',
    ],
)
def test_guard_believes_no_broken_profile(quiet_profile: Path, text: str) -> None:
    quiet_profile.write_text(text)
    assert guard.profile.find({"what": "x"}) is None
    guard.profile.keep({"what": "x"}, {"chosen": "a"})
    if "99" in text:
        assert quiet_profile.read_text() == text
    else:
        assert guard.profile.find({"what": "x"})["chosen"] == "a"


def test_guard_keeps_what_the_tuner_wrote(quiet_profile: Path) -> None:
    quiet_profile.write_text('{"format": 1, "groups": [{"machine": "m"}], "more": 2}')
    guard.profile.keep({"what": "x"}, {"chosen": "a"})
    guard.profile.keep({"what": "x"}, {"chosen": "b"})
    document = json.loads(quiet_profile.read_text())
    assert document["groups"] == [{"machine": "m"}]
    assert document["more"] == 2
    assert [entry["chosen"] for entry in document["decisions"]] == ["b"]


def test_guard_says_of_an_exception_the_begin_of_its_first_line() -> None:
    assert guard.first_line(ValueError("too long\nand a story")) == "ValueError: too long"
    assert guard.first_line(ValueError()) == "ValueError"
    back_ends = ", ".join(f"BackEnd{number}" for number in range(100))
    said = guard.first_line(NotImplementedError(f"only available for these: {back_ends}"))
    assert said.startswith("NotImplementedError: only available for these: BackEnd0, ")
    assert said.endswith(" ...")
    assert len(said) < 300
