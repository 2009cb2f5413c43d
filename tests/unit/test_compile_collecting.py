"""compile.collecting: a first compile searches for cycles rarely, and leaves all as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import deepytorch_core.compile
from deepytorch_core.compile import collecting, policies


@pytest.fixture(autouse=True)
def thresholds_of_its_own() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("threshold", [(700, 10, 10), (0, 7, 3), (90_000, 5, 5)])
def test_compile_threshold_is_the_programs_again(threshold: tuple[int, int, int]) -> None:
    gc.set_threshold(*threshold)
    with collecting.rarely():
        youngest, *others = gc.get_threshold()
        assert youngest == (collecting.OBJECTS if threshold[0] == 700 else threshold[0])
        assert tuple(others) == threshold[1:]
    assert gc.get_threshold() == threshold


def test_compile_what_the_program_sets_meanwhile_stays() -> None:
    gc.set_threshold(700, 10, 10)
    with collecting.rarely():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


class Watched(policies.Policy):
    name = "watched"

    def __init__(self) -> None:
        self.compiling: list[tuple[int, ...]] = []
        self.running: list[tuple[int, ...]] = []

    def compile_graph(self, graph: GraphModule, inputs: Sequence[Any]) -> policies.Runner:
        self.compiling.append(gc.get_threshold())

        def run(*args: Any) -> Any:
            self.running.append(gc.get_threshold())
            return graph(*args)

        return run


def test_compile_first_call_alone_searches_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, rare = (700, 10, 10), (collecting.OBJECTS, 10, 10)
    gc.set_threshold(*usual)
    watched = Watched()
    policies.names()  # loads them
    monkeypatch.setitem(policies._table, "watched", watched)
    model = deepytorch_core.compile.compile(nn.Linear(5, 3), policy="watched")
    for _ in range(8):
        model(torch.randn(7, 5)).sum().backward()
    deepytorch_core.compile.undo(model)
    assert watched.compiling == [rare]
    assert watched.running[0] == rare
    assert set(watched.running[-3:]) == {usual}
    assert gc.get_threshold() == usual
