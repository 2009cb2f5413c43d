"""How many tokens passes may have that micro-batches share, on a GPU that is made up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from deepytorch.integrations.padding_free.pass_budget import (
    MOST_TIMED_STEPS,
    MOST_TOKENS,
    Fixed,
    Measured,
    StepTokens,
)
from deepytorch.integrations.padding_free.pass_budget import measured as measured_of
from deepytorch_core import guard
from deepytorch_core.base import config
from deepytorch_core.base.config import Options

GIB = 1 << 30


@pytest.fixture(autouse=True)
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "_current", Options(profile=str(tmp_path / "profile")))


class Machine:
    """A GPU with some free memory, and a clock that stands still but for steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int, pass_bytes: int) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(guard, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
        self.taken = pass_bytes
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: GIB + self.taken)

    def train(
        self,
        budget: Measured,
        *,
        apart_us: float,
        merged_us: float,
        preparing_us: float = 0.0,
        num_preparing: int = 0,
        shared_bytes: int = 0,
    ) -> list[int]:
        """Take steps of four micro-batches of 900 to 1,000 tokens; returns budgets.

        The first `num_preparing` shared passes take `preparing_us` more for each token. A shared
        pass takes `shared_bytes`, or what four of one micro-batch do.
        """
        shared_bytes = shared_bytes or 4 * self.taken
        found, step = [], None
        for _ in range(50):
            budget.note(step)
            found.append(budget.tokens)
            is_preparing = budget.tokens > 0 and len(found) - found.count(0) <= num_preparing
            token_us = merged_us + preparing_us * is_preparing if budget.tokens else apart_us
            self.now += 3_800 * token_us / 1e6
            is_shared = budget.tokens >= 3_800
            self.taken = max(self.taken, shared_bytes * is_shared)
            step = StepTokens(3_800, 1_000, 3_800 if is_shared else 1_000)
        return found


def measured() -> Measured:
    return measured_of(torch.nn.Linear(2, 2), torch.device("cuda", 0))


def test_passes_are_shared_after_four_steps_and_stay_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, free=100 * GIB, pass_bytes=GIB)
    budget = measured()
    found = machine.train(budget, apart_us=20, merged_us=12)
    assert found == [0] * 4 + [MOST_TOKENS] * 46
    assert budget.problem is None
    assert budget.times_ms == pytest.approx({"apart": 20.0, "merged": 12.0})


def test_slower_passes_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, free=100 * GIB, pass_bytes=GIB)
    budget = measured()
    found = machine.train(budget, apart_us=12, merged_us=13)
    assert MOST_TOKENS in found
    assert found[-1] == 0
    assert budget.problem == "passes of their own are faster"


def test_shared_passes_that_are_slow_while_they_are_prepared_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, free=100 * GIB, pass_bytes=GIB)
    budget = measured()
    found = machine.train(
        budget, apart_us=20, merged_us=12, preparing_us=60, num_preparing=MOST_TIMED_STEPS // 2
    )
    assert found[-1] == MOST_TOKENS
    assert budget.times_ms == pytest.approx({"apart": 20.0, "merged": 12.0})


def test_the_next_run_shares_passes_from_its_first_step_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, free=100 * GIB, pass_bytes=GIB)
    machine.train(measured(), apart_us=20, merged_us=12)
    budget = measured()
    assert not budget.is_settled
    found = machine.train(budget, apart_us=20, merged_us=90)
    assert found == [0] + [MOST_TOKENS] * 49
    assert budget.times_ms == {}
    (entry,) = guard.profile.entries()
    assert entry["chosen"] == "merged"


def test_what_is_no_longer_in_memory_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, free=100 * GIB, pass_bytes=GIB)
    machine.train(measured(), apart_us=20, merged_us=12)
    machine = Machine(monkeypatch, free=2 * GIB, pass_bytes=GIB)
    budget = measured()
    assert set(machine.train(budget, apart_us=20, merged_us=12)) == {0}
    assert "memory is lacking" in str(budget.problem)


def test_who_wants_the_same_bits_gets_what_the_profile_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, free=100 * GIB, pass_bytes=GIB)
    options = Options(profile=str(tmp_path / "profile"), deterministic=True)
    monkeypatch.setattr(config, "_current", options)
    assert "not measured: deterministic" in str(measured().problem)
    monkeypatch.setattr(config, "_current", Options(profile=str(tmp_path / "profile")))
    machine.train(measured(), apart_us=20, merged_us=12)
    monkeypatch.setattr(config, "_current", options)
    assert machine.train(measured(), apart_us=20, merged_us=12)[-1] == MOST_TOKENS


def test_memory_bounds_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, free=10 * GIB, pass_bytes=GIB)
    found = machine.train(measured(), apart_us=20, merged_us=12)
    assert found[-1] == 6_000


def test_passes_grow_once_they_show_what_a_token_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, free=10 * GIB, pass_bytes=GIB)
    found = machine.train(measured(), apart_us=20, merged_us=12, shared_bytes=2 * GIB)
    most = 10 * 3_800 * 6 // 20  # 0.6 of the memory
    assert found == [0] * 4 + [6_000] * 3 + [most] * 43
    # The next run knows it, and goes by the memory that is free then.
    machine = Machine(monkeypatch, free=8 * GIB, pass_bytes=2 * GIB)
    found = machine.train(measured(), apart_us=20, merged_us=12)
    assert found == [0] + [most * 8 // 10] * 49


def test_passes_do_not_grow_beyond_what_memory_was_lacking_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, free=10 * GIB, pass_bytes=GIB)
    budget = measured()
    machine.train(budget, apart_us=20, merged_us=12, shared_bytes=2 * GIB)
    budget.lacked(4_000)
    assert budget.tokens == 2_000
    budget = measured()
    budget.lacked(4_000)
    assert max(machine.train(budget, apart_us=20, merged_us=12)) <= 2_000


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
        budget.note(StepTokens(4 * most, most, most))
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
    budget.note(StepTokens(1, 1, 1))
    budget.lacked(6_000)
    assert budget.tokens == 3_000
