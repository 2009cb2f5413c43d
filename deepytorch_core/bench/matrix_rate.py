"""Measures how fast a GPU multiplies matrices: the ceiling of what a training step can reach."""

from __future__ import annotations

import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor

import torch

WIDTH = 8192
_WARMED, _TIMED = 10, 30


def matrix_rate() -> float | None:
    """Return the operations per second of bfloat16 products on the first GPU; None without one.

    A product of two matrices of `WIDTH` x `WIDTH` has 2 * WIDTH**3 operations. A process of its own
    measures, which leaves no memory taken.
    """
    if not torch.cuda.is_available():
        return None
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_measured).result()


def _measured() -> float:
    a, b = (torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED + 1)]  # type: ignore[no-untyped-call]
    for _ in range(_WARMED):
        torch.mm(a, b, out=out)
    events[0].record()
    for event in events[1:]:
        torch.mm(a, b, out=out)
        event.record()
    torch.cuda.synchronize()
    pairs = zip(events, events[1:], strict=False)
    milliseconds = statistics.median(begin.elapsed_time(end) for begin, end in pairs)
    return float(2 * WIDTH**3 / (1e-3 * milliseconds))
