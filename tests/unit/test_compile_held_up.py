"""A step that waits for the compiler says so, once it has waited for a while."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch_core.base import console
from deepytorch_core.compile import held_up
from deepytorch_core.compile.policies import Policy, register_policy

pytestmark = pytest.mark.usefixtures("own_profile")


class Late(Policy):
    """Compiles until the line is there, or for ten seconds."""

    name = "late"

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        until = time.monotonic() + 10
        while not console._said and time.monotonic() < until:
            time.sleep(0.01)
        return graph.forward


def trained() -> None:
    register_policy(Late)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    deepytorch.compile(model, "late", budget_s=77)
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()


def test_it_is_said_once_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(held_up, "LONG_S", 0.05)
    before = threading.active_count()
    trained()
    said = [line for line in capsys.readouterr().err.splitlines() if "the step waits" in line]
    assert len(said) == 1
    assert "Sequential" in said[0]
    assert "about 77 s at most" in said[0]
    assert threading.active_count() == before


def test_a_short_wait_is_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    with held_up.said("Block", 77):
        pass
    assert "the step waits" not in capsys.readouterr().err


def test_other_ranks_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(held_up, "LONG_S", 0.0)
    monkeypatch.setattr(console, "global_rank", lambda: 1)
    with held_up.said("Block", 77):
        time.sleep(0.1)
    assert "the step waits" not in capsys.readouterr().err
