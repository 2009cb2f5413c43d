"""Tests that a change of what a replayed pass has frozen is seen."""

from __future__ import annotations

import gc
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves as leaves

from deepytorch_core import guard
from deepytorch_core.compile import capture, module_state, seam
from deepytorch_core.compile.capture import CaptureWatch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
        self.heat = 1.0
        self.settings = types.SimpleNamespace(heat=1.0, more={"weights": [1, 2]})
        self.settings.itself = self.settings
        self.kept: list[Any] = []


CHANGES: list[Callable[[Any], Any]] = [
    lambda net: setattr(net, "heat", 2.0),
    lambda net: setattr(net.settings, "heat", 2.0),
    lambda net: net.settings.more["weights"].append(3),
    lambda net: net.settings.more.update(name="other"),
    lambda net: setattr(net.inner[1], "p", 0.1),
    lambda net: net.inner.eval(),
    lambda net: net.inner[0].requires_grad_(False),
    lambda net: setattr(net.inner[0].weight, "data", torch.zeros(3, 3)),
    lambda net: net.inner.append(nn.ReLU()),
    lambda net: net.inner.__setitem__(0, nn.Linear(3, 3)),
    lambda net: setattr(net.inner[2], "running_mean", torch.zeros(3)),
    lambda net: net.kept.append(torch.zeros(2)),
    lambda net: setattr(net, "seen", torch.zeros(2)),
    lambda net: net.bfloat16(),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_compile_sees_what_changes_in_a_module(number: int) -> None:
    net = Net()
    states = module_state.States(net)
    before = states.now()
    assert states.now() == before
    CHANGES[number](net)
    now = states.now()
    assert now != before
    assert module_state.States(net).now() == before, "a first look"
    assert states.now() == now


def test_compile_does_not_mind_what_training_does_to_a_module() -> None:
    net = Net()
    states = module_state.States(net)
    before = states.now()
    net.inner(torch.randn(4, 3)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    handle = net.register_forward_hook(lambda *_: None)
    net.heat = float("1.0")
    assert states.now() == before
    assert module_state.hooked(net) is None
    handle.remove()
    net.inner[1].register_forward_pre_hook(lambda *_: None)
    assert module_state.hooked(net) == "inner.1"
    assert states.now() != before


def test_compile_knows_a_state_that_comes_back() -> None:
    net = Net()
    states = module_state.States(net)
    seen = []
    for heat in (1.0, 0.5, 1.0, 0.25, 0.5, 0.125):
        net.settings.heat = heat * float("1.0")
        seen.append(states.now())
    assert seen == [0, 1, 0, 2, 1, 3]


def test_compile_knows_a_module_whose_parts_are_compiled_for_a_while() -> None:
    net = Net()
    states = module_state.States(net)
    before = states.now()
    opened: Any = seam.opened(net.inner[0])
    opened.region = net.inner[0].forward
    assert states.now() == before
    net.heat = 2.0
    assert states.now() != before
    net.heat = 1.0
    opened.region = None
    seam.close(net.inner[0])
    assert states.now() == before


@pytest.mark.parametrize("make", [lambda: torch.zeros(2), lambda: [torch.zeros(2)], lambda: Net])
def test_compile_takes_nothing_for_what_had_its_address(make: Callable[[], Any]) -> None:
    net = Net()
    states = module_state.States(net)
    numbers = []
    for _ in range(60):
        net.heat = make()  # the one before is gone by the next look
        numbers.append(states.now())
    same = make() is make()
    assert len(set(numbers)) == (1 if same else 60)


def test_compile_lets_go_of_what_it_has_seen_of_a_module() -> None:
    net = Net()
    states = module_state.States(net)
    seen = []
    for _ in range(2 * module_state.MOST_KNOWN):
        net.heat, bank = torch.zeros(2), Net()
        net.kept = [bank]
        states.now()
        seen += [weakref.ref(net.heat), weakref.ref(bank)]
        del bank
    assert not any(reference() is not None for reference in seen[:-2:2]), "tensors"
    assert sum(reference() is not None for reference in seen[1::2]) <= module_state.MOST_KNOWN, (
        "in lists"
    )
    net.heat, net.kept = 1.0, []
    states.forget()
    gc.collect()
    assert not any(reference() is not None for reference in seen)


def test_compile_puts_attributes_back() -> None:
    net = Net()
    net.kept.append("mine")
    states = module_state.States(net)
    before, attributes = states.now(), module_state.attributes_of(net)
    net.heat = 3.0
    net.kept.append("new")
    net.calls = 1
    del net.inner[1].p
    module_state.put_back(attributes)
    assert states.now() == before
    assert (net.kept, net.inner[1].p, hasattr(net, "calls")) == (["mine"], 0.5, False)


def test_compile_sees_who_asks_for_random_numbers_on_the_host() -> None:
    before = guard.HostNumbers()
    assert guard.HostNumbers() == before
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        draw()
        now = guard.HostNumbers()
        assert now != before
        before = now


def test_compile_tells_assigned_numbers_from_tensors_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Tensors of a GPU are those with dimensions, here.
    monkeypatch.setattr(capture, "_has_gpu_tensor", lambda results: results[0].dim() > 0)
    monkeypatch.setattr(
        capture,
        "_has_host_tensor",
        lambda args: any(
            isinstance(leaf, torch.Tensor) and leaf.dim() == 0 for leaf in leaves(args)
        ),
    )
    target, number = torch.zeros(3, 4), torch.tensor(2.0)
    with CaptureWatch() as watch:
        target[..., 0] = 3
        target[1:, 2:] = True
    assert watch.problem is None
    for assign in (
        lambda: target.__setitem__(0, number),
        lambda: target.fill_(number),
        lambda: target.__setitem__(torch.tensor([0, 2]), 1.0),
    ):
        with CaptureWatch() as watch:
            target[0] = 1.0
            assign()
        assert watch.problem is not None
        assert "reads a tensor on the host" in watch.problem


def test_compile_watches_operations_for_what_a_graph_would_freeze() -> None:
    with CaptureWatch() as watch:
        torch.ones(3) + 1
    assert watch.problem is None
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Not gloo: torch's may abort the process that lets its group go.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        with CaptureWatch() as watch:
            dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()
    assert watch.problem == "it communicates with other ranks"
