"""Policies whose compiler is another package: what they ask of it, and what its failure becomes."""

from __future__ import annotations

import copy
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.base import decisions
from deepytorch_core.compile import policies

pytestmark = pytest.mark.usefixtures("own_profile")

GPU = torch.device("cuda")


class Thunder(types.ModuleType):
    """In place of lightning-thunder: `jit` takes a module and gives what is called like it."""

    def __init__(self, jit: Callable[[nn.Module], Any]) -> None:
        super().__init__("thunder")
        self.__spec__ = importlib.machinery.ModuleSpec("thunder", None)
        self.jit = jit


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[nn.Module], Any]], None]:
    """Puts a `Thunder` with this `jit` among the packages, which compiles for CPUs as well."""

    def put(jit: Callable[[nn.Module], Any]) -> None:
        monkeypatch.setitem(sys.modules, "thunder", Thunder(jit))
        thunder = policies.get("thunder")
        monkeypatch.setattr(type(thunder), "why_not", lambda self, device: None)

    return put


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(network: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    torch.manual_seed(5)
    losses = []
    for _ in range(3):
        loss = network(torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_compile_thunder_is_a_candidate_on_gpus_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thunder = policies.get("thunder")
    monkeypatch.setitem(sys.modules, "thunder", None)
    assert thunder.why_not(GPU) == "lightning-thunder is not installed"
    assert thunder not in policies.automatic(GPU)
    monkeypatch.setitem(sys.modules, "thunder", Thunder(lambda module: module))
    assert thunder.why_not(torch.device("cpu")) == "its executors are for GPUs"
    assert thunder.why_not(GPU) is None
    assert thunder in policies.automatic(GPU)


def test_compile_thunder_runs_what_its_jit_gives(install: Any) -> None:
    calls: list[int] = []

    def jit(module: nn.Module) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append(len(args))
            return module(*args)

        return run

    install(jit)
    ours = model()
    expected = train(copy.deepcopy(ours))
    deepytorch.compile(ours, "thunder")
    assert train(ours) == pytest.approx(expected, rel=1e-6)
    (region,) = engine.compilation_of(ours).regions  # type: ignore[union-attr]
    assert (region.failure, region.told.chosen) == (None, {"thunder": 1})
    assert len(calls) >= 3


def fails_to_compile(module: nn.Module) -> Any:
    raise NotImplementedError("no executor for this\nand a long story")


def fails_when_called(module: nn.Module) -> Any:
    def run(*args: Any) -> Any:
        raise RuntimeError("no executor for this\nand a long story")

    return run


def is_wrong(module: nn.Module) -> Any:
    return lambda *args: tuple(output * 1.1 for output in module(*args))


@pytest.mark.parametrize(
    ("jit", "cause"),
    [
        (fails_to_compile, "NotImplementedError: no executor for this"),
        (fails_when_called, "RuntimeError: no executor for this"),
        (is_wrong, "differs"),
    ],
)
def test_compile_thunder_that_fails_leaves_the_model_eager_with_one_line(
    jit: Callable[[nn.Module], Any], cause: str, install: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    install(jit)
    ours = model()
    expected = train(copy.deepcopy(ours))
    deepytorch.compile(ours, "thunder")
    found: Any = engine.compilation_of(ours)
    assert train(ours) == pytest.approx(expected, rel=1e-6)
    lines = [line for line in capfd.readouterr().err.splitlines() if "runs eagerly" in line]
    assert len(lines) == 1
    assert cause in lines[0]
    assert "long story" not in lines[0]
    (region,) = found.regions
    assert cause in region.told.dropped["thunder"]
    made = decisions.made()[-1]
    assert (made["chosen"], made["reason"]) == ("eager", "nothing of it could be compiled")
