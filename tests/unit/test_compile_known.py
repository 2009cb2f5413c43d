"""The profile's facts of a model's passes are used once these are what they will be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.compile import compilation, kept, outcome, policies, reasons, undecided


@pytest.mark.parametrize("chosen", ["aot-eager", "eager"])
@pytest.mark.parametrize("num_open", [0, 1, 17])
def test_what_is_known_waits_until_passes_are_what_they_will_be(
    chosen: str, num_open: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("aot-eager")])
    options = Options(profile=str(tmp_path / "p.json"), log="error", tune="auto")
    monkeypatch.setattr(config, "_current", options)
    monkeypatch.setattr(decisions, "_made", [])
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    known = kept.Kept("compile of Sequential", policies.AUTO)
    known.look_at(model, torch.device("cpu"))
    entry = {"chosen": chosen, "reason": "faster than eager", "times_ms": {"eager": 1.0}}
    known.keep(entry, num_ranks=1, is_final=True)
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
    assert settled_at <= num_open + compilation.PATIENT_STEPS
    (decision,) = decisions.made()
    assert (decision["chosen"], decision["reason"]) == (chosen, "from the profile")
    assert bool(found.regions) == (chosen != "eager")
    undecided.register(model, None)
    engine.undo(model)
    torch._dynamo.reset()


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
