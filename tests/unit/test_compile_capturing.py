"""The trial of CUDA graphs, by steps that a clock makes up: when it ends, and what it keeps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.compile import capture, capturing, turns

CAPTURED = capturing.CAPTURING_STEPS
FIRST_LOOK = CAPTURED + 2 * turns.BLOCK * turns.LOOKS[0]
LAST_LOOK = CAPTURED + turns.MOST_STEPS


class Never:
    """A Capture that has nothing to capture: which way a step goes is all that counts here."""

    num_captured = 0
    failure: str | None = None
    problem = None

    def __init__(self, root: nn.Module, **_: Any) -> None: ...

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
    tmp_path: Path,
    replayed_s: float,
    noise: float,
    steps: int,
    chosen: str,
    reason: str,
) -> None:
    clock = Clock(replayed_s, noise)
    monkeypatch.setattr(capturing, "time", clock)
    monkeypatch.setattr(capturing, "Capture", Never)
    monkeypatch.setattr(capture, "why_not", lambda root: None)
    monkeypatch.setattr(decisions, "_made", [])
    options = Options(profile=str(tmp_path / "profile.json"), log="error")
    monkeypatch.setattr(config, "_current", options)
    ways: list[bool] = []
    trial = capturing.Capturing(nn.Linear(2, 2), tokens=lambda: 7, switch=ways.append)
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


def test_a_models_trunk_is_tried_where_the_whole_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock(0.8, 0.01)
    monkeypatch.setattr(capturing, "time", clock)
    monkeypatch.setattr(capturing, "Capture", Waiting)
    monkeypatch.setattr(Waiting, "tried", [])
    monkeypatch.setattr(capture, "why_not", lambda root: None)
    monkeypatch.setattr(decisions, "_made", [])
    options = Options(profile=str(tmp_path / "profile.json"), log="error")
    monkeypatch.setattr(config, "_current", options)
    trunk = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    whole = nn.ModuleDict({"trunk": trunk, "head": nn.Linear(2, 2)})
    ways: list[bool] = []
    trial = capturing.Capturing(whole, tokens=lambda: 7, switch=ways.append)
    while not trial.is_settled:
        trial.on_forward(True)
        clock.step(ways[-1])
    assert Waiting.tried == [whole, trunk]
    assert trial.is_replayed
    (decision,) = decisions.made()
    assert decision["what"] == "CUDA graphs of Sequential"
