"""The trial of CUDA graphs, by steps that a clock makes up: when it ends, and what it keeps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.compile import capture, graph_trial, turns

CAPTURED = graph_trial.CAPTURING_STEPS
FIRST_LOOK = CAPTURED + 2 * turns.BLOCK * turns.LOOKS[0]
LAST_LOOK = CAPTURED + turns.MOST_STEPS


class Never:
    """A Capture that has nothing to capture: which way a step goes is all that counts here."""

    num_captured = 0
    failure: str | None = None
    problem = None

    def __init__(
        self, root: nn.Module, *, is_on: Callable[[], bool] = lambda: False, **_: Any
    ) -> None:
        self._is_on = is_on

    @property
    def was_replayed(self) -> bool:
        return self._is_on()

    def install(self) -> None: ...

    def remove(self) -> None: ...


class Clock:
    """Steps take a second launched and `replayed_s` replayed, give or take some noise."""

    def __init__(self, replayed_s: float, noise: float) -> None:
        self.now = 0.0
        self._replayed_s, self._noise = replayed_s, noise
        self._numbers = random.Random(1)

    def perf_counter(self) -> float:
        return self.now

    def step(self, is_replayed: bool) -> None:
        took_s = self._replayed_s if is_replayed else 1.0
        self.now += took_s * self._numbers.gauss(1.0, self._noise)


@pytest.fixture(autouse=True)
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is known, and nothing speaks against graphs."""
    monkeypatch.setattr(capture, "why_not", lambda root: None)
    monkeypatch.setattr(decisions, "_made", [])
    options = Options(profile=str(tmp_path / "profile.json"), log="error")
    monkeypatch.setattr(config, "_current", options)


@pytest.mark.parametrize(
    ("replayed_s", "noise", "steps", "chosen", "reason"),
    [
        (0.8, 0.01, FIRST_LOOK, "replayed", "faster than launched"),
        (1.2, 0.01, FIRST_LOOK, "launched", "launched is faster"),
        (1.0, 0.001, FIRST_LOOK, "launched", "not faster beyond the noise"),
        (1.0, 0.03, LAST_LOOK, "launched", "not faster beyond the noise"),
    ],
)
def test_it_ends_as_soon_as_more_steps_would_tell_nothing(
    monkeypatch: pytest.MonkeyPatch,
    replayed_s: float,
    noise: float,
    steps: int,
    chosen: str,
    reason: str,
) -> None:
    clock = Clock(replayed_s, noise)
    monkeypatch.setattr(graph_trial, "time", clock)
    monkeypatch.setattr(graph_trial, "Capture", Never)
    ways: list[bool] = []
    trial = graph_trial.GraphTrial(nn.Linear(2, 2), tokens=lambda: 7, switch=ways.append)
    taken = 0
    while not trial.is_settled:
        trial.on_forward(True)
        clock.step(ways[-1])
        taken += not trial.is_settled
    assert taken == steps
    assert all(ways[:CAPTURED])
    assert trial.is_replayed == (chosen == "replayed")
    (decision,) = decisions.made()
    assert (decision["chosen"], decision["reason"]) == (chosen, reason)


class Waiting(Never):
    """A Capture of passes that wait for the GPU, but those of a trunk."""

    tried: ClassVar[list[nn.Module]] = []

    def __init__(self, root: nn.Module, **more: Any) -> None:
        super().__init__(root, **more)
        self.tried.append(root)
        if isinstance(root, nn.ModuleDict):
            self.failure = "it waits for the GPU"


def settled(
    monkeypatch: pytest.MonkeyPatch, *, is_provisional: bool
) -> tuple[int, graph_trial.GraphTrial]:
    """Run a trial of a model whose trunk is faster replayed; also return how many steps it took."""
    clock = Clock(0.8, 0.01)
    monkeypatch.setattr(graph_trial, "time", clock)
    monkeypatch.setattr(graph_trial, "Capture", Waiting)
    monkeypatch.setattr(Waiting, "tried", [])
    trunk = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    whole = nn.ModuleDict({"trunk": trunk, "head": nn.Linear(2, 2)})
    ways: list[bool] = []
    trial = graph_trial.GraphTrial(
        whole, tokens=lambda: 7, switch=ways.append, is_provisional=is_provisional
    )
    number = 0
    while not trial.is_settled:
        trial.on_forward(True)
        clock.step(ways[-1])
        number += 1
    assert trial.is_replayed
    return number, trial


def test_a_models_trunk_is_tried_where_the_whole_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled(monkeypatch, is_provisional=False)
    assert [type(module) for module in Waiting.tried] == [nn.ModuleDict, nn.Sequential]
    (decision,) = decisions.made()
    assert decision["what"] == "CUDA graphs of Sequential"


class Growing(Never):
    """A Capture that has graphs for one of three sizes at first, and for all after a while."""

    calls = 0
    captured_after: ClassVar[int] = 0

    @property
    def was_replayed(self) -> bool:
        self.calls += 1
        return self._is_on() and (self.calls >= self.captured_after or self.calls % 3 == 0)


@pytest.mark.parametrize("captured_after", [40, 10_000])
def test_steps_without_a_graph_say_nothing_of_replays(
    monkeypatch: pytest.MonkeyPatch, captured_after: int
) -> None:
    clock = Clock(0.6, 0.01)
    monkeypatch.setattr(graph_trial, "time", clock)
    monkeypatch.setattr(graph_trial, "Capture", Growing)
    monkeypatch.setattr(Growing, "captured_after", captured_after)
    ways: list[bool] = []
    trial = graph_trial.GraphTrial(nn.Linear(2, 2), tokens=lambda: 7, switch=ways.append)
    number = 0
    while not trial.is_settled:
        trial.on_forward(True)
        number += 1
        clock.step(ways[-1] and (number >= captured_after or number % 3 == 0))
    assert trial.is_replayed
    (decision,) = decisions.made()
    assert decision["times_ms"]["replayed"] == pytest.approx(600, rel=0.05)


def test_pauses_count_for_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0, 0.001)
    monkeypatch.setattr(graph_trial, "time", clock)
    monkeypatch.setattr(graph_trial, "Capture", Waiting)
    monkeypatch.setattr(Waiting, "tried", [])
    ways: list[bool] = []
    trial = graph_trial.GraphTrial(nn.Linear(2, 2), tokens=lambda: 7, switch=ways.append)
    for number in itertools.count():
        trial.on_forward(True)
        if trial.is_settled:
            break
        clock.step(ways[-1])
        if not ways[-1] and number % 4:
            trial.pause(True)
            clock.step(False)
            trial.pause(False)
    (decision,) = decisions.made()
    assert (decision["chosen"], decision["reason"]) == ("launched", turns.UNDECIDED)


def test_nothing_is_replayed_that_hardly_ever_could_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Rarely(Never):
        calls = 0

        @property
        def was_replayed(self) -> bool:
            self.calls += 1
            return self._is_on() and self.calls % 20 == 0

    clock = Clock(0.6, 0.01)
    monkeypatch.setattr(graph_trial, "time", clock)
    monkeypatch.setattr(graph_trial, "Capture", Rarely)
    trial = graph_trial.GraphTrial(nn.Linear(2, 2), tokens=lambda: 7)
    while not trial.is_settled:
        trial.on_forward(True)
        clock.step(False)
    (decision,) = decisions.made()
    assert (decision["chosen"], decision["reason"]) == ("launched", turns.UNDECIDED)


def test_the_next_run_knows_at_once_what_was_found_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number, _ = settled(monkeypatch, is_provisional=True)
    assert number > CAPTURED
    number, _ = settled(monkeypatch, is_provisional=True)
    assert number == 1
    assert not decisions.made()
    # The whole isn't captured again in vain.
    assert [type(module) for module in Waiting.tried] == [nn.Sequential]


@pytest.mark.parametrize("is_known", [False, True], ids=["measured", "from the profile"])
def test_what_was_found_for_a_while_stays_with_its_graphs(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_known:
        settled(monkeypatch, is_provisional=True)
    _, trial = settled(monkeypatch, is_provisional=True)
    num_tried = len(Waiting.tried)
    trial.pause(True)
    trial.confirm()
    assert trial.is_replayed
    assert not trial.is_paused
    assert len(Waiting.tried) == num_tried
    (decision,) = decisions.made()
    assert (decision["what"], decision["chosen"]) == ("CUDA graphs of Sequential", "replayed")
    assert decision["reason"] == "faster than launched"
    assert decision["times_ms"]["replayed"] == pytest.approx(800, rel=0.05)
    # The next run takes it over, in its first step and without a look at the whole.
    number, _ = settled(monkeypatch, is_provisional=False)
    assert number == 1
    assert [type(module) for module in Waiting.tried] == [nn.Sequential]


@pytest.mark.parametrize("replayed_s", [0.8, 1.3])
def test_what_was_found_for_a_while_is_tried_anew_with_its_graphs(
    replayed_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(0.8, 0.01)
    monkeypatch.setattr(graph_trial, "time", clock)
    monkeypatch.setattr(graph_trial, "Capture", Waiting)
    monkeypatch.setattr(Waiting, "tried", [])
    ways: list[bool] = []
    trial = graph_trial.GraphTrial(
        nn.Linear(2, 2), tokens=lambda: 7, switch=ways.append, is_provisional=True
    )

    def run() -> int:
        number = 0
        while not trial.is_settled:
            trial.on_forward(True)
            clock.step(ways[-1])
            number += 1
        return number

    run()
    assert trial.is_replayed
    clock._replayed_s = replayed_s
    trial.start_anew()
    assert run() == FIRST_LOOK - CAPTURED + 1
    assert trial.is_replayed == (replayed_s < 1)
    assert len(Waiting.tried) == 1
    (decision,) = decisions.made()
    assert decision["times_ms"]["replayed"] == pytest.approx(1e3 * replayed_s, rel=0.05)


def test_few_sizes_are_used_by_who_asked_before_there_were_any() -> None:
    class Sizes:
        are_few, is_shared, num_tokens, state = True, False, None, None

        def __init__(self) -> None:
            self.users: set[str] = set()

        def use_few(self, is_on: bool, by: str) -> None:
            (self.users.add if is_on else self.users.discard)(by)

    model, sizes = nn.Linear(2, 2), Sizes()
    capture.use_few_sizes(model, True, by="replays")
    capture.use_few_sizes(model, True, by="another")
    capture.use_few_sizes(model, False, by="another")
    capture.register_sizes(model, sizes)
    assert sizes.users == {"replays"}
    capture.use_few_sizes(model, False, by="replays")
    assert not sizes.users
    capture.register_sizes(model, None)
    capture.register_sizes(model, sizes)
    assert not sizes.users
