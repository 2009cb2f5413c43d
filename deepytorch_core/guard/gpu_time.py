"""How long the GPU computes for a call, whatever its launches take.

Eager steps of many small kernels keep a GPU waiting, and two ways of computing them seem to be
equally fast. What is replayed afterwards, or compiled into fewer kernels, does not wait: there the
faster way is the one whose kernels take less time. So a call is captured as a CUDA graph, and its
replays are timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepytorch_core import guard
from deepytorch_core.guard.recorder import Recorder

REPLAYS = 3
# More than any GPU's clock, so that launches end before what they wait for.
CYCLES_PER_S = 3e9

Call = Callable[[], object]


def clock_for(module: nn.Module, call: Call, ranks: guard.Ranks) -> guard.Clock:
    """Return a clock of a call's seconds on the GPU as it trains `module`; collective over `ranks`.

    It replays `call`, which has run before, if every rank can capture it. Otherwise, `call` is
    launched while the GPU is kept busy with something else. GPUs take about a thousand launches
    ahead, so the rest of a longer call is timed as it is launched.
    """
    device = next(module.parameters()).device
    recorder = Recorder(device)

    problem = recorder.lacks_memory()
    if problem is None:
        try:
            _replayed(recorder, module, call)
        except Exception as error:  # whatever a capture may raise
            problem = guard.first_line(error)
    if ranks.first_problem(problem) is None:
        return functools.partial(_replayed, recorder, module)
    return launched_ahead(device)


def launched_ahead(device: torch.device) -> guard.Clock:
    """Return a clock of a call that is launched while the GPU is kept busy with something else.

    It is for calls that can't be captured, or would compute something else if they were.
    """
    return functools.partial(_launched_ahead, device)


def _replayed(recorder: Recorder, module: nn.Module, call: Call) -> float:
    def alone() -> None:
        torch.clear_autocast_cache()  # of weights that others have cast, or others of them
        call()
        torch.clear_autocast_cache()

    with recorder.own_leaves(module):
        with recorder.rehearsing():
            alone()
        recorder.take_new_memory()
        graph, _ = recorder.record(alone)
        graph.replay()

        def replays() -> None:
            for _ in range(REPLAYS):
                graph.replay()

        return _timed(recorder.device, replays) / REPLAYS


def _launched_ahead(device: torch.device, call: Call) -> float:
    launching_s = _timed(device, call)
    return _timed(device, call, busy_s=launching_s)


def _timed(device: torch.device, call: Call, *, busy_s: float = 0.0) -> float:
    """Seconds on the GPU, which computes something else for `busy_s` before."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    stream = torch.cuda.current_stream(device)
    guard.synchronize(device)
    if busy_s:
        torch.cuda._sleep(int(CYCLES_PER_S * busy_s))  # type: ignore[no-untyped-call]
    start.record(stream)
    call()
    end.record(stream)
    guard.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3
