"""Fewer rounds where Inductor times the variants of a kernel.

It does so as the kernel first runs: some 200 runs of each variant, for which a CPU takes 20 ms. A
large model has hundreds of variants, and the training waits for all of them. A tenth of the rounds
finds the same one but for ties.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

ROUNDS = {
    "estimation_iters": 3,
    "memory_warmup_iters": 10,
    "benchmark_iters": 20,
    "max_benchmark_duration": 5,  # milliseconds
}


@contextlib.contextmanager
def in_few_rounds() -> Iterator[None]:
    """While open, in any thread. Nothing happens where torch's function takes no such numbers."""
    from torch._inductor.runtime import benchmarking

    timer: Any = benchmarking.benchmarker
    names = inspect.signature(timer.benchmark_gpu).parameters
    if "benchmark_gpu" in vars(timer) or not ROUNDS.keys() <= names.keys():
        yield
        return
    timer.benchmark_gpu = functools.partial(timer.benchmark_gpu, **ROUNDS)
    try:
        yield
    finally:
        vars(timer).pop("benchmark_gpu", None)
