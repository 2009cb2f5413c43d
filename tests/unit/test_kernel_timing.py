"""How often Inductor runs what it chooses among."""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor.runtime import benchmarking

from deepytorch_core.compile import kernel_timing


class Timer:
    """Like Inductor's: it says what it was asked for."""

    def benchmark_gpu(
        self,
        _callable: Any,
        estimation_iters: int = 5,
        memory_warmup_iters: int = 100,
        benchmark_iters: int = 100,
        max_benchmark_duration: int = 25,
        **more: Any,
    ) -> tuple[int, ...]:
        rounds = (estimation_iters, memory_warmup_iters, benchmark_iters, max_benchmark_duration)
        return *rounds, *more.values()


class Older:
    def benchmark_gpu(self, _callable: Any, **more: Any) -> dict[str, Any]:
        return more


def test_the_rounds_are_few_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer()
    monkeypatch.setattr(benchmarking, "benchmarker", timer)
    few = tuple(kernel_timing.ROUNDS.values())
    with kernel_timing.in_few_rounds():
        assert timer.benchmark_gpu(None, rep=7) == (*few, 7)
        with kernel_timing.in_few_rounds():
            assert timer.benchmark_gpu(None) == few
        assert timer.benchmark_gpu(None) == few
    assert timer.benchmark_gpu(None) == (5, 100, 100, 25)


def test_one_without_such_numbers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Older()
    monkeypatch.setattr(benchmarking, "benchmarker", timer)
    with kernel_timing.in_few_rounds():
        assert timer.benchmark_gpu(None, rep=7) == {"rep": 7}


def test_torchs_own_takes_them() -> None:
    own: Any = benchmarking.InductorBenchmarker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmarking, "benchmarker", own)
        with kernel_timing.in_few_rounds():
            assert own.benchmark_gpu.keywords == kernel_timing.ROUNDS
