"""The profile's facts of a model's passes are used once these are what they will be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core import guard
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.compile import (
    ahead,
    capture,
    graph_trial,
    kept,
    outcome,
    policies,
    reasons,
    undecided,
)
from deepytorch_core.compile.life import opening


def known_model(monkeypatch: pytest.MonkeyPatch, folder: Path, entry: dict[str, Any]) -> Any:
    """Make a model of which the profile knows this."""
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("aot-eager")])
    options = Options(profile=str(folder / "p.json"), log="error", tune="auto")
    monkeypatch.setattr(config, "_current", options)
    monkeypatch.setattr(decisions, "_made", [])
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    known = kept.Kept("compile of Sequential", policies.AUTO)
    known.look_at(model, torch.device("cpu"))
    known.keep(entry, num_ranks=1, is_final=True)
    return model


@pytest.mark.parametrize("chosen", ["aot-eager", "eager"])
@pytest.mark.parametrize("num_open", [0, 1, 17])
def test_what_is_known_waits_until_passes_are_what_they_will_be(
    chosen: str, num_open: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = {"chosen": chosen, "reason": "faster than eager", "times_ms": {"eager": 1.0}}
    model = known_model(monkeypatch, tmp_path, entry)
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    settled_at = None
    for number in range(num_open + 12):
        is_open = number < num_open
        undecided.register(model, lambda is_open=is_open: is_open)  # type: ignore[misc]
        model(torch.randn(4, 8)).square().mean().backward()
        if is_open:
            assert not found.is_settled
            assert not found.regions
        elif found.is_settled and settled_at is None:
            settled_at = number
    assert settled_at is not None
    assert settled_at <= num_open + opening.PATIENT_STEPS
    (decision,) = decisions.made()
    assert (decision["chosen"], decision["reason"]) == (chosen, "from the profile")
    assert bool(found.regions) == (chosen != "eager")
    undecided.register(model, None)
    engine.undo(model)
    torch._dynamo.reset()


class Helpers:
    """Stands in for `ahead.Ahead`."""

    made: list[Helpers] = []

    def __init__(self, device: torch.device, policy: str, *, budget_s: float) -> None:
        self.started: list[int] = []
        self.is_closed = False
        Helpers.made.append(self)

    def start(self, num_parts: int) -> None:
        self.started.append(num_parts)

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("chosen", ["aot-eager", "eager"])
def test_helpers_are_started_while_passes_may_still_change(
    chosen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = {"chosen": chosen, "reason": "faster than eager", "times_ms": {"eager": 1.0}}
    entry["was_helped"] = True
    model = known_model(monkeypatch, tmp_path, entry)
    monkeypatch.setattr(ahead, "may_help", lambda *_, **__: True)
    monkeypatch.setattr(ahead, "Ahead", Helpers)
    monkeypatch.setattr(Helpers, "made", [])
    deepytorch.compile(model)
    undecided.register(model, lambda: True)
    for _ in range(10):
        model(torch.randn(4, 8)).square().mean().backward()
    assert [helpers.started for helpers in Helpers.made] == ([[1]] if chosen != "eager" else [])
    undecided.register(model, None)
    engine.undo(model)
    assert all(helpers.is_closed for helpers in Helpers.made)
    torch._dynamo.reset()


class Never:
    """A Capture that captures nothing."""

    num_captured = 0
    failure: str | None = None

    def __init__(self, root: nn.Module, **_: Any) -> None: ...

    def install(self) -> None: ...

    def remove(self) -> None: ...


class Sizes:
    """Batches have few sizes as long as somebody wants that; others are chosen afterwards."""

    are_few, is_shared, num_tokens, state = True, False, None, None

    def __init__(self) -> None:
        self.users: set[str] = set()
        self.num_chosen = 0

    def use_few(self, is_on: bool, by: str) -> None:
        self.num_chosen += is_on and not self.users
        (self.users.add if is_on else self.users.discard)(by)


@pytest.mark.parametrize("way", ["replayed", "launched"])
def test_replays_take_over_the_sizes_that_were_chosen(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(capture, "why_not", lambda root: None)
    monkeypatch.setattr(graph_trial, "Capture", Never)
    monkeypatch.setattr(graph_trial, "is_wanted", lambda *_, **more: True)
    entry = {"chosen": "eager", "reason": reasons.UNDECIDED, "times_ms": {"eager": 1.0}}
    model = known_model(monkeypatch, tmp_path, entry)
    trial = graph_trial.GraphTrial(model, tokens=lambda: 1)
    entry = {"chosen": way, "reason": "faster", "times_ms": {way: 1.0}}
    guard.profile.keep(trial._key(1, model), entry)
    sizes = Sizes()
    capture.register_sizes(model, sizes)
    deepytorch.compile(model)
    for _ in range(12):
        model(torch.randn(4, 8)).square().mean().backward()
    found: Any = engine.compilation_of(model)
    assert found.is_settled
    made = {decision["what"]: decision["chosen"] for decision in decisions.made()}
    assert made == {"compile of Sequential": "eager", "CUDA graphs of Sequential": way}
    assert sizes.num_chosen == 1
    assert sizes.users == ({"replays"} if way == "replayed" else set())
    engine.undo(model)
    assert not sizes.users
    capture.register_sizes(model, None)


@pytest.mark.parametrize(
    ("reason", "times_ms", "is_final"),
    [
        (reasons.FASTER, {"eager": 2.0, "inductor": 1.0}, True),
        (reasons.SLOWER, {"eager": 1.0, "inductor": 2.0}, True),
        (reasons.UNDECIDED, {"eager": 1.0, "inductor": 0.97}, True),
        (reasons.UNDECIDED, {"eager": 1.0, "inductor": 1.4}, True),
        (reasons.UNDECIDED, {"eager": 1.0, "inductor": 0.9}, False),
        (reasons.UNDECIDED, {}, False),
    ],
)
def test_a_gain_that_noise_may_hide_is_looked_for_again_if_it_may_be_large(
    reason: str, times_ms: dict[str, float], is_final: bool
) -> None:
    assert outcome.is_final([], reason, times_ms) == is_final
