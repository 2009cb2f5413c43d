"""Some passes are replayed, others are not: a graph is a function that is called again."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.compile import capture
from emulated_graphs import Emulated


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "Recorder", Emulated)
    monkeypatch.setattr(config, "_current", Options(patience="off", log="error"))


class Printing(nn.Module):
    """Prints where `is_loud`, which no graph does."""

    is_loud = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_loud:
            print("a pass")
        return torch.tanh(self.inner(x))


def test_a_way_that_cannot_be_replayed_leaves_the_other_ones_replays() -> None:
    model = Printing().train()
    captured = capture.Capture(model, is_on=lambda: True, variant=lambda: model.is_loud)
    captured.install()

    def is_replayed(is_loud: bool) -> bool:
        model.is_loud = is_loud
        model(torch.randn(2, 4)).sum().backward()
        model.zero_grad()
        return captured.was_replayed

    for _ in range(capture.WATCHED_CALLS):
        is_replayed(False)
    assert is_replayed(False)
    assert not any(is_replayed(True) for _ in range(capture.MOST_MISSES + 4))
    assert captured.failure is None
    assert is_replayed(False)
    assert not captured.replays(True)
    captured.remove()


_seeds = itertools.count()


class Noisy(nn.Module):
    """Switches autocast on within; its gradients come with noise, as sums in no order have."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = self.inner(x)
        found.register_hook(self.with_noise)
        return found.float()

    def with_noise(self, gradient: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(next(_seeds))
        factor = torch.randn(gradient.shape, dtype=torch.float32, device="cpu", generator=generator)
        return (gradient * (1 + self.noise * factor)).to(gradient.dtype)


@pytest.mark.parametrize(("noise", "is_replayed"), [(0.003, True), (0.5, False)])
def test_passes_are_alike_as_far_as_the_format_within_can_tell(
    noise: float, is_replayed: bool
) -> None:
    model = Noisy(noise).train()
    captured = capture.Capture(model, is_on=lambda: True)
    captured.install()
    for _ in range(capture.WATCHED_CALLS + 1):
        model(torch.randn(64, 8)).sum().backward()
        model.zero_grad()
    assert captured.was_replayed == is_replayed, captured.problem
    assert is_replayed or "given the same twice" in str(captured.problem)
    captured.remove()


def test_passes_that_can_never_be_replayed_are_given_up() -> None:
    model = Printing().train()
    model.is_loud = True
    captured = capture.Capture(model, is_on=lambda: True, variant=lambda: 0)
    captured.install()
    for _ in range(capture.WATCHED_CALLS + capture.MOST_MISSES):
        model(torch.randn(2, 4)).sum().backward()
    assert captured.failure == "it prints"
    captured.remove()


class Masked(nn.Module):
    """Makes a mask from numbers of the host, and keeps it until the length is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.tril(torch.ones(len(x), len(x), dtype=torch.float32, device="cpu"))
        return self.mask @ self.inner(x)


def watched(model: nn.Module, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> capture.Capture:
    """Train while torch.tril counts as an operation that reads the host's memory."""
    is_read = False

    def reads(args: object) -> bool:
        nonlocal is_read
        was_read, is_read = is_read, False
        return was_read

    real = torch.tril

    def tril(*args: Tensor) -> Tensor:
        nonlocal is_read
        is_read = True
        return real(*args)

    monkeypatch.setattr(torch, "tril", tril)
    monkeypatch.setattr(capture, "_has_host_tensor", reads)
    monkeypatch.setattr(capture, "_has_gpu_tensor", lambda args: True)
    captured = capture.Capture(model.train(), is_on=lambda: True)
    captured.install()
    for size in sizes:
        model(torch.randn(size, 4, dtype=torch.float32, device="cpu")).sum().backward()
        model.zero_grad()
    return captured


def test_a_pass_that_makes_a_mask_does_not_speak_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = watched(Masked(), monkeypatch, [3] * (1 + capture.WATCHED_CALLS + 1))
    assert captured.failure is None
    assert captured.was_replayed


def test_a_mask_made_in_every_pass_keeps_passes_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = watched(Masked(), monkeypatch, [3, 5] * capture.MOST_PREPARING)
    assert captured.failure is not None
    assert "reads a tensor on the host" in captured.failure
