"""How many tokens passes may have that micro-batches share, on a GPU that is made up."""

from __future__ import annotations

import time

import pytest
import torch

from deepytorch.integrations.padding_free.pass_budget import (
    MOST_TOKENS,
    Fixed,
    Measured,
    StepTokens,
)
from deepytorch_core import guard

GIB = 1 << 30


class Machine:
    """A GPU with some free memory, and a clock that stands still but for steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int, pass_bytes: int) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(guard, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: GIB + pass_bytes)

    def train(self, budget: Measured, *, apart_us: float, merged_us: float) -> list[int]:
        """Take steps of four micro-batches of 900 to 1,000 tokens; returns budgets."""
        found, step = [], None
        for _ in range(20):
            budget.note(step)
            found.append(budget.tokens)
            self.now += 3_800 * (merged_us if budget.tokens else apart_us) / 1e6
            step = StepTokens(3_800, 1_000)
        return found


def measured() -> Measured:
    return Measured(torch.device("cuda", 0))


def test_passes_are_shared_after_four_steps_and_stay_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, free=100 * GIB, pass_bytes=GIB)
    budget = measured()
    found = machine.train(budget, apart_us=20, merged_us=12)
    assert found == [0] * 4 + [MOST_TOKENS] * 16
    assert budget.problem is None
    assert budget.times_ms == pytest.approx({"apart": 20.0, "merged": 12.0})


def test_slower_passes_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, free=100 * GIB, pass_bytes=GIB)
    budget = measured()
    found = machine.train(budget, apart_us=12, merged_us=13)
    assert MOST_TOKENS in found
    assert found[-1] == 0
    assert budget.problem == "passes of their own are faster"


def test_memory_bounds_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, free=10 * GIB, pass_bytes=GIB)
    found = machine.train(measured(), apart_us=20, merged_us=12)
    assert found[-1] == 6_000


@pytest.mark.parametrize(
    ("free", "most", "why"),
    [(2 * GIB, 1_000, "memory is lacking"), (500 * GIB, 9_000, "9000 tokens, which fill a GPU")],
)
def test_passes_stay_apart_where_several_do_not_fit(
    free: int, most: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, free=free, pass_bytes=GIB)
    budget = measured()
    for _ in range(8):
        budget.note(StepTokens(4 * most, most))
    assert budget.tokens == 0
    assert why in str(budget.problem)


def test_steps_that_tell_nothing_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, free=100 * GIB, pass_bytes=GIB)
    budget = measured()
    for _ in range(30):
        budget.note(None)
    assert budget.tokens == 0
    assert not budget.is_settled


def test_a_budget_is_halved_where_memory_was_lacking() -> None:
    budget = Fixed(8_192)
    budget.note(StepTokens(1, 1))
    budget.lacked(6_000)
    assert budget.tokens == 3_000
