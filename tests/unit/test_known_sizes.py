"""Sizes of packed rows that an earlier run has chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from deepytorch.integrations.padding_free import known_sizes
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.data.shapes import Shapes

BATCHES = [1_000 + 37 * number % 900 for number in range(30)]


def run(model: nn.Module, *, of: str = "batches", begins_at: int = 0) -> list[int]:
    """Tokens of the rows that a run of the model has, with what fills them up."""
    shapes = Shapes()
    known_sizes.resume(model, shapes, of=of)
    shapes.use_few(6)
    return [shapes.fit(tokens, 8, 300).num_tokens for tokens in BATCHES[begins_at:]]


@pytest.fixture(autouse=True)
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    monkeypatch.setattr(config, "_current", Options(profile=str(path)))
    return path


def test_the_next_run_has_the_first_one_s_sizes_from_its_first_batch_on() -> None:
    first = run(nn.Linear(3, 3))
    assert first[:11] == BATCHES[:11]
    second = run(nn.Linear(3, 3), begins_at=5)
    assert second[7:] == first[12:]
    assert not set(second) & set(BATCHES)


def test_other_models_and_other_rows_have_sizes_of_their_own() -> None:
    run(nn.Linear(3, 3))
    assert run(nn.Linear(3, 4))[:11] == BATCHES[:11]
    assert run(nn.Linear(3, 3), of="shared passes")[:11] == BATCHES[:11]


def test_who_asks_anew_gets_sizes_of_this_run(
    monkeypatch: pytest.MonkeyPatch, profile: Path
) -> None:
    run(nn.Linear(3, 3))
    monkeypatch.setattr(config, "_current", Options(profile=str(profile), tune="force"))
    assert run(nn.Linear(3, 3))[:11] == BATCHES[:11]
