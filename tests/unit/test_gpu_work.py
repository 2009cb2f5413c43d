"""The driver's count of a GPU's work, of a driver that is made up."""

from __future__ import annotations

import time

import pytest
import torch

from deepytorch_core.metering.gpu_work import GpuWork


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return now


def test_a_second_has_one_sample_and_a_minute_counts(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def utilization() -> int:
        asked.append(clock[0])
        return 20 if clock[0] < 160 else 90

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    work = GpuWork()
    assert work.share is None
    for step in range(500):
        clock[0] = 100 + step / 4
        work.sample()
    assert asked == [100.0 + second for second in range(125)]
    assert work.share == pytest.approx(0.9)  # the first minute is forgotten


def test_a_driver_that_is_not_asked_again_after_it_gave_no_answer(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def utilization() -> int:
        asked.append(clock[0])
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    work = GpuWork()
    for _ in range(5):
        clock[0] += 2
        work.sample()
    assert len(asked) == 1
    assert work.share is None


def test_without_a_gpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 1 / 0)
    work = GpuWork()
    work.sample()
    assert work.share is None
