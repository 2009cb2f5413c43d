"""`deepytorch explain compile`: decisions, and what runs met that decided nothing."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import deepytorch
from deepytorch import cli
from deepytorch_core import compile as engine
from deepytorch_core import guard
from deepytorch_core.base import decisions
from deepytorch_core.compile import compilation, policies
from deepytorch_core.compile.life import step_count
from deepytorch_core.compile.policies import Policy, register_policy

pytestmark = pytest.mark.usefixtures("own_profile")


def explained() -> str:
    said = CliRunner().invoke(cli.app, ["explain", "compile"])
    assert said.exit_code == 0, said.output
    return said.output


def place_of(method: Callable[..., Any], text: str) -> str:
    """file:line of the line of `method` that has `text`."""
    lines, first = inspect.getsourcelines(method)
    (number,) = [number for number, line in enumerate(lines) if text in line]
    return f"{__file__}:{first + number}"


class Prints(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        print("at work")  # noqa: T201
        return x.relu()


class Waits(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * 2 if x.sum().item() > 0 else x


class Straight(nn.Linear):
    pass


class Refusing(Policy):
    name = "refusing"

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel for this")


class Same(Policy):
    name = "same"

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        return graph.forward


class EvenClock:
    """Every step takes as long as any other, give or take a little."""

    def __init__(self) -> None:
        self._now, self._noise = 0.0, torch.Generator().manual_seed(3)

    def perf_counter(self) -> float:
        self._now += 1 + 0.01 * torch.randn(1, generator=self._noise).item()
        return self._now


def train(model: nn.Module, steps: int) -> None:
    torch.manual_seed(5)
    for _ in range(steps):
        model(torch.randn(3, 5)).square().mean().backward()


def train_auto(monkeypatch: pytest.MonkeyPatch, model: nn.Module, policy: type[Policy]) -> None:
    """With one candidate, and steps that take equally long with and without it."""
    register_policy(policy)
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get(policy.name)])
    monkeypatch.setattr(step_count, "time", EvenClock())
    engine.compile(model, is_patient=False)
    train(model, steps=70)
    assert decisions.made()[-1]["chosen"] == "eager"


def known(model: nn.Module, policy: str = "auto") -> Any:
    """Return what the next run would take for decided."""
    found = compilation.Compilation(model, policy, budget_s=1.0, steps=None)
    found.kept.look_at(found.subject.root, torch.device("cpu"))
    return found.kept.find(1)


@pytest.mark.parametrize(("made", "text"), [(Prints, "print("), (Waits, ".item()")])
def test_explain_names_where_a_model_of_a_named_policy_breaks(
    made: type[nn.Linear], text: str
) -> None:
    model = made(5, 7)
    deepytorch.compile(model, "aot-eager")
    train(model, steps=3)
    said = explained()
    assert f"compile of {made.__name__} (1 rank(s)" in said
    assert "aot-eager, asked for" in said
    assert f"graph break: {place_of(made.forward, text)}: " in said
    assert known(model) is None
    assert known(model, "aot-eager") is None


def test_explain_has_runs_that_left_it_undecided(
    monkeypatch: pytest.MonkeyPatch, own_profile: Path
) -> None:
    model = Prints(5, 7)
    train_auto(monkeypatch, model, Same)
    said = explained()
    assert "eager, not faster beyond the noise" in said
    assert said.count(" ms a step") == 2  # the times that left it undecided
    assert f"graph break: {place_of(Prints.forward, 'print(')}: " in said
    # The next run takes it over. As a note it would decide nothing, until a decision stands for it.
    entry = known(model)
    assert entry["chosen"] == "eager"
    wanted = entry.pop("for")
    own_profile.unlink()
    guard.profile.note(wanted, entry)
    assert known(model) is None
    assert "eager, not faster beyond the noise" in explained()
    guard.profile.keep(wanted, {**entry, "reason": "faster than eager"})
    assert "beyond the noise" not in explained()
    assert known(model)["reason"] == "faster than eager"


def test_explain_has_models_of_which_nothing_could_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Straight(5, 7)
    train_auto(monkeypatch, model, Refusing)
    said = explained()
    assert "compile of Straight (1 rank(s)" in said
    assert "eager, nothing of it could be compiled" in said
    assert "RuntimeError: no kernel for this" in said
    assert known(model) is None


def test_notes_are_of_the_last_run_and_not_without_end(own_profile: Path) -> None:
    guard.profile.keep({"what": "x"}, {"chosen": "a"})
    for number in range(guard.profile._MOST_NOTES + 3):
        guard.profile.note({"what": f"compile of {number}"}, {"chosen": "eager"})
    guard.profile.note({"what": "compile of 50"}, {"chosen": "same"})
    notes = guard.profile.notes()
    assert len(notes) == guard.profile._MOST_NOTES
    assert notes[-1] == {"for": {"what": "compile of 50"}, "chosen": "same"}
    assert notes[0]["for"]["what"] == "compile of 3"
    assert guard.profile.find({"what": "compile of 50"}) is None
    assert guard.profile.find({"what": "x"}) is not None
    own_profile.write_text('{"format": 1, "notes": {"what": "is this"}, "groups": []}')
    assert guard.profile.notes() == []


def test_explain_compile_shows_decisions_and_breaks(own_profile: Path) -> None:
    entry = {
        "chosen": "inductor",
        "reason": "faster than eager",
        "times_ms": {"eager": 2.0, "inductor": 1.5},
        "regions": {"layers.0": ["inductor"]},
        "blocks": {"layers.0": 8},
        "dropped": {"max-autotune": "RuntimeError: no"},
        "graph_breaks": ["model.py:12: call to print"],
        "compile_s": 3.0,
        "trial_s": {"eager steps": 1.25, "compiling": 4.0},
    }
    guard.profile.keep(guard.profile.key("compile of Net", {}, world_size=2), entry)
    said = CliRunner().invoke(cli.app, ["explain", "compile"])
    assert said.exit_code == 0
    for part in ("compile of Net (2 rank(s)", "inductor, faster than eager", "shared by 8 blocks"):
        assert part in said.output
    assert "graph break: model.py:12: call to print" in said.output
    assert "dropped max-autotune: RuntimeError: no" in said.output
    assert "training steps included: eager steps 1.2 s, compiling 4.0 s" in said.output
    (shown,) = json.loads(CliRunner().invoke(cli.app, ["explain", "compile", "--json"]).output)
    assert shown["chosen"] == "inductor"
    missing = CliRunner().invoke(cli.app, ["explain", "compile", "Other"])
    assert "holds no decision about compiling Other" in str(missing.exception)
