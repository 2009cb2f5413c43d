"""Fixtures that several files of unit tests begin and end with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepytorch_core.base import config, console
from deepytorch_core.base.config import Options


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Messages of earlier tests are said again."""
    console._said.clear()


@pytest.fixture
def own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A profile of the test's own; afterwards nothing is compiled any more."""
    import torch

    from deepytorch_core import compile as engine
    from deepytorch_core.compile import policies

    policies.names()  # loaded, so that what a test adds is taken away again
    monkeypatch.setattr(policies, "_table", dict(policies._table))
    before = config._current
    config.set_current(Options(profile=str(tmp_path / "profile.json"), patience="off"))
    yield tmp_path / "profile.json"
    engine.undo_all()
    torch._dynamo.reset()
    config.set_current(before)
