"""Calls captured in CUDA graphs: GPU time without the cost of launching from the CPU.

Each arm's call is captured several times into one graph, so that a replay is long beside what its
own launch takes. What is timed are replays, in the blocks of `timing`.

A graph refers to its buffers, and NCCL registers them at capture. The buffers must live as long as
the graph does, on every rank, since a peer's replay reads and writes them too.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepytorch_core.bench import timing
from deepytorch_core.bench.ops import Collective

MIN_CALLS = 2
MAX_CALLS = 20
REPLAY_US = 1000.0
PROBED_CALLS = 5


class ReplayableGraph(Protocol):
    """The result of capturing; a `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> object: ...

    def reset(self) -> object: ...


Capture = Callable[[timing.Call, int], ReplayableGraph]
"""Captures that many runs of a call, one after the other, into one graph."""


@dataclass(frozen=True)
class Graphs:
    """How graphs are made and timed on this rank."""

    clock: timing.Clock
    ranks: timing.Agreement
    capture: Capture

    @contextlib.contextmanager
    def captured(self, call: timing.Call, count: int) -> Iterator[ReplayableGraph]:
        """A graph of `count` calls, for as long as the context is open. All ranks take part.

        The call ran before: connections and staging, which a capture cannot make, are there. Leave
        with all replays done on this rank: the graph ends once all ranks came there.
        """
        self.ranks.barrier()
        graph = self.capture(call, count)
        self.ranks.barrier()
        yield graph
        # Not after an error: the others might never come, and the process ends anyway.
        self.ranks.barrier()
        graph.reset()
        self.ranks.barrier()

    def about(self, call: timing.Call, *, in_graph: bool) -> float:
        """Microseconds of a call, the slowest rank's, from a few of them. It ran before."""
        if not in_graph:
            return timing.probe([call], clock=self.clock, ranks=self.ranks)[0]
        with self.captured(call, PROBED_CALLS) as graph:
            (replay_us,) = timing.probe([graph.replay], clock=self.clock, ranks=self.ranks)
        return replay_us / PROBED_CALLS


def calls_per_graph(call_us: float) -> int:
    """How many calls of about `call_us` microseconds make a replay that is worth timing."""
    return min(max(math.ceil(REPLAY_US / max(call_us, 1.0)), MIN_CALLS), MAX_CALLS)


def is_idempotent(op: Collective) -> bool:
    """Whether calls in a row give what one does, so that a graph of many can be checked."""
    return not (op.in_place and op.reduces)


def capture(call: timing.Call, count: int) -> ReplayableGraph:
    """A `Capture` on the current device."""
    # Untyped in torch.
    graph: Any = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Other threads, such as NCCL's watchdog, may do meanwhile what a capture must not.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    torch.cuda.synchronize()
    captured: ReplayableGraph = graph
    return captured
