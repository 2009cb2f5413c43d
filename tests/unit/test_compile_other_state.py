"""Compiled models whose passes use what no compiler follows: numpy, generators, caches, signals."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import deepytorch

pytestmark = pytest.mark.usefixtures("one_thread", "own_profile")

POLICIES = ("auto", "aot-eager")


class Net(nn.Module):
    """Does something to its input, or to what its layer gives, that its kind says."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.change = change
        self.numbers = np.random.RandomState(3)
        self.generator = torch.Generator().manual_seed(3)
        self.own = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.layer(x))


def by_norm(_: Any, h: Tensor) -> Tensor:
    return h / float(np.linalg.norm(h.detach().numpy()))


def by_order(_: Any, h: Tensor) -> Tensor:
    return h[torch.from_numpy(np.argsort(h.detach().numpy()[:, 0]).copy())]


def by_mean_of_list(_: Any, h: Tensor) -> Tensor:
    return h - float(np.mean(h.detach().sum(1).tolist()))


def chosen(_: Any, h: Tensor) -> Tensor:
    return h * float(np.random.choice([0.5, 1.0, 2.0]))


def normal(_: Any, h: Tensor) -> Tensor:
    return h + float(np.random.normal())


def own_numbers(net: Any, h: Tensor) -> Tensor:
    return h + float(net.numbers.uniform())


def own_permutation(net: Any, h: Tensor) -> Tensor:
    return h[torch.randperm(6, generator=net.generator)]


def pythons_choice(_: Any, h: Tensor) -> Tensor:
    return h * random.choice([0.5, 1.0, 2.0])


def pythons_shuffle(_: Any, h: Tensor) -> Tensor:
    order = list(range(6))
    random.shuffle(order)
    return h[order]


def own_gauss(net: Any, h: Tensor) -> Tensor:
    return h + net.own.gauss(0.0, 1.0)


@functools.cache
def drawn_once(number: int) -> Tensor:
    return torch.randint(0, 5, (number,)).float()


def cached(_: Any, h: Tensor) -> Tensor:
    return h + drawn_once(8)


# The default policy's code breaks at the same places; these cases of it take longest to compile.
LONG = (by_norm, by_order, chosen, normal, pythons_shuffle, own_gauss)
CHANGES = [
    by_norm,
    by_order,
    by_mean_of_list,
    chosen,
    normal,
    own_numbers,
    own_permutation,
    pythons_choice,
    pythons_shuffle,
    own_gauss,
    cached,
]


def trained(change: Callable[[Any, Tensor], Tensor], policy: str | None) -> list[float]:
    """Losses, and what every generator gives next."""
    drawn_once.cache_clear()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    net = Net(change)
    if policy is not None:
        deepytorch.compile(net, policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = torch.arange(6.0)[:, None] * torch.ones(6, 8)
    found = []
    for _ in range(8):
        loss = (net(rows) * torch.arange(6.0)[:, None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    found += [np.random.rand(), random.random(), torch.rand(()).item(), net.numbers.rand()]
    return [*found, net.own.random(), torch.rand((), generator=net.generator).item()]


@pytest.mark.parametrize(
    ("change", "policy"),
    [
        pytest.param(
            change, policy, marks=[pytest.mark.extended] * (policy == "auto" and change in LONG)
        )
        for change in CHANGES
        for policy in POLICIES
    ],
)
def test_passes_beyond_a_compiler_are_stocks(
    change: Callable[[Any, Tensor], Tensor], policy: str
) -> None:
    assert trained(change, policy) == pytest.approx(trained(change, None), rel=1e-4)


class OutOfTimeError(Exception):
    """An error that a script's handler raises."""


def as_exception(*_: Any) -> None:
    raise OutOfTimeError


def as_exit(*_: Any) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("number", "handler", "raised"),
    [
        (signal.SIGALRM, as_exception, OutOfTimeError),
        (signal.SIGUSR1, as_exception, OutOfTimeError),
        (signal.SIGTERM, as_exit, SystemExit),
    ],
)
def test_what_a_signal_handler_raises_while_something_compiles_is_heard(
    number: signal.Signals, handler: Any, raised: type[BaseException]
) -> None:
    before = signal.signal(number, handler)
    torch._dynamo.reset()
    net = nn.Sequential(*(nn.Linear(8, 8) if each % 2 else nn.Tanh() for each in range(40)))
    deepytorch.compile(net, "aot-eager")
    child = os.fork()
    if child == 0:  # tells the parent while it compiles
        time.sleep(0.2)
        os.kill(os.getppid(), number)
        os._exit(0)

    def train() -> None:
        while True:
            net(torch.randn(6, 8)).square().mean().backward()

    try:
        with pytest.raises(raised):
            train()
    finally:
        os.waitpid(child, 0)
        signal.signal(number, before)
