"""A comparison that ends before compilation is decided says so, and how many steps are enough."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch.cli import compare, launcher
from deepytorch.cli.compare import report
from deepytorch_core import compile as engine
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.compare import probe
from deepytorch_core.compare.result import Sample, judge
from deepytorch_core.compile import ahead, turns
from deepytorch_core.compile.life import compiled_trial, opening

LAST = opening.EAGER_STEPS + compiled_trial.COMPILED_STEPS + turns.MOST_STEPS


@pytest.fixture(autouse=True)
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_current", Options(tune="force", log="error"))


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()


def test_what_a_model_is_still_waiting_for_is_known_until_it_is_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "may_help", lambda root, device, num_ranks: True)
    model = engine.compile(nn.Linear(2, 2), steps=None, is_patient=True)
    assert probe._undecided(0) == []  # it may never be trained
    train(model, 8)  # four optimizer steps of two micro-batches
    (found,) = probe._undecided(4)
    assert (found["what"], found["is_begun"]) == ("compile of Linear", False)
    assert found["after_steps"] > LAST // 2
    engine.undo(model)
    assert probe._undecided(4) == []


def test_a_trial_under_way_is_told_apart() -> None:
    model = engine.compile(nn.Linear(2, 2))
    found = engine.compilation_of(model)
    assert found is not None
    train(model, 2)
    found.regions = [Any]  # type: ignore[list-item]
    assert found.trial == engine.OpenTrial("compile of Linear", True, 1, LAST)
    found.regions = []
    engine.undo(model)


def ran(arm: str, **changes: Any) -> Sample:
    sample = Sample(
        arm=arm,
        steps=4,
        is_complete=True,
        block_s=(1.0,),
        setup_s=1.0,
        losses=(1.0,) * 4,
        peak_bytes=1,
        device="cpu",
        redirected=(),
        made_folders=(),
        seams=("ddp",),
        native_calls=0,
        decisions=(),
    )
    return dataclasses.replace(sample, **changes)


def test_nothing_is_advised_from_steps_that_were_too_few() -> None:
    options = launcher.parse(("train.py",), command="run", default_processes="1")
    job = compare.Job(
        arguments=("train.py",),
        options=options,
        default_processes="1",
        world_size=1,
        steps=4,
        rounds=2,
        arms=("stock", "deepytorch"),
        timeout_s=1.0,
    )
    trial = {"what": "compile of Net", "is_begun": True, "after_steps": 62}
    samples = [ran("stock"), ran("deepytorch", undecided=(trial,))] * 2
    rows = dict(report.findings(job, samples, [judge(samples, "deepytorch")], 0))
    assert "compile of Net was still being tried" in rows["undecided"]
    assert "--steps 200 do" in rows["undecided"]
    assert rows["to keep"] == "nothing that these steps show: see undecided"
    waiting = ran("deepytorch", undecided=({**trial, "is_begun": False},))
    assert "had not begun" in report.undecided(waiting)[0]
    samples = [ran("stock"), ran("deepytorch")] * 2
    rows = dict(report.findings(job, samples, [judge(samples, "deepytorch")], 0))
    assert "undecided" not in rows
    assert rows["to keep"] == "nothing: train as before"
