"""A trial of CUDA graphs begins when helpers have done the code that it would capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepytorch_core.compile.life import replay_trial
from deepytorch_core.compile.life.replay_trial import ReplayTrial


class Graphs:
    """A trial that goes on for ever."""

    is_settled = is_measured = False

    def __init__(self) -> None:
        self.num_steps = 0

    def on_forward(self, is_whole: bool) -> None:
        self.num_steps += is_whole


class Region:
    """A region of whose calls none has compiled code while helpers have its graphs."""

    def __init__(self, *, is_awaited: bool = False, is_waiting: bool = False) -> None:
        self.is_awaited, self.is_waiting = is_awaited, is_waiting
        self.is_rare = False
        self._num_asked = 0

    @property
    def num_unready(self) -> int:
        self._num_asked += not self.is_rare and (self.is_awaited or self.is_waiting)
        return self._num_asked


def trial(*, is_on: bool = True, **facts: bool) -> tuple[ReplayTrial, Any, Graphs]:
    region = Region(**facts)
    steps = SimpleNamespace(number=10, is_whole=True)
    graphs: Any = Graphs()
    state: Any = SimpleNamespace(regions=[region], is_on=is_on, steps=steps)
    return ReplayTrial(state, graphs), region, graphs


@pytest.mark.parametrize("what", ["is_awaited", "is_waiting"])
def test_it_waits_for_helpers_before_it_measures(what: str) -> None:
    phase, region, graphs = trial(**{what: True})
    for _ in range(20):
        phase.on_step()
    assert graphs.num_steps == 0
    setattr(region, what, False)
    phase.on_step()
    assert graphs.num_steps == 1
    setattr(region, what, True)  # of a size that came later
    phase.on_step()
    assert graphs.num_steps == 1
    graphs.is_measured = True
    phase.on_step()
    assert graphs.num_steps == 2


def test_it_waits_for_some_steps_and_where_code_is_used() -> None:
    phase, _, graphs = trial(is_waiting=True)
    phase.on_step()
    most = phase.last_step
    for _ in range(replay_trial.MOST_HELD + 4):
        phase.on_step()
    assert graphs.num_steps == 5
    assert phase.last_step < most
    phase, _, graphs = trial(is_on=False, is_waiting=True)
    phase.on_step()
    assert graphs.num_steps == 1


def test_it_does_not_wait_for_sizes_that_few_steps_have() -> None:
    phase, region, graphs = trial()
    for _ in range(replay_trial.LOOKED_AT):
        phase.on_step()
    region.is_waiting = True
    phase.on_step()  # one of that size
    region.is_rare = True
    phase.on_step()
    assert graphs.num_steps == replay_trial.LOOKED_AT + 2
