"""Sizes that a region is called with: those which come again are worth a graph of their own."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepytorch_core.compile.ahead import HelperJob

# So many that were seen once are remembered: a pass has layers, and batches have ever other sizes.
_MOST_SEEN = 256


@dataclass(eq=False)
class CapturedGraph:
    """A graph that this process is to compile, or to find in torch's caches.

    Attributes:
        inputs: those of the captured call, to compile it with.
        job: that of the helper which compiles it before.
        is_ready: whether it may be compiled here now.
    """

    inputs: Sequence[Any]
    job: HelperJob = field(default_factory=HelperJob)
    is_ready: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether a helper has compiled it."""
        return self.job.is_over and not self.job.problem


class RegionSizes:
    """Those of one region.

    Args:
        limit: how many may have a graph of their own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[Hashable] = set()
        self._awaited: dict[Hashable, list[CapturedGraph]] = {}
        self._seen: dict[Hashable, int] = {}

    def are_known(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, again: int) -> bool:
        """Whether a call with these has a graph, or is to get one as it has come before.

        `again`: after how many calls.
        """
        size = _size_of(args, kwargs)
        if size in self._known:
            return True
        if len(self._known) >= self._limit:
            return False
        seen = self._seen[size] = self._seen.get(size, 0) + 1
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        if seen <= again:
            return False
        self._known.add(size)
        return True

    def have(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these has a graph."""
        return _size_of(args, kwargs) in self._known

    def await_code(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], graphs: Sequence[CapturedGraph]
    ) -> None:
        """Helpers have these graphs of a call with these arguments."""
        self._awaited.setdefault(_size_of(args, kwargs), []).extend(graphs)

    def are_awaited(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a graph of such a call was not taken over yet, or never will be."""
        return _size_of(args, kwargs) in self._awaited

    @property
    def have_awaited(self) -> bool:
        """Whether that is so for any call."""
        return bool(self._awaited)

    @property
    def are_waiting(self) -> bool:
        """Whether helpers still have a graph."""
        return not all(graph.job.is_over for graph in itertools.chain(*self._awaited.values()))

    def take_over(self) -> bool:
        """Let graphs run whose code is there; returns whether that is so for any."""
        done = [
            size
            for size, graphs in self._awaited.items()
            if all(graph.is_compiled for graph in graphs)
        ]
        for size in done:
            for graph in self._awaited.pop(size):
                graph.is_ready = True
        return bool(done)

    def lost(self) -> list[str]:
        """Why nobody will compile some graphs, each told once; their inputs are let go of."""
        graphs = list(itertools.chain(*self._awaited.values()))
        lost = [graph for graph in graphs if graph.job.problem and len(graph.inputs)]
        for graph in lost:
            graph.inputs = ()
        return [graph.job.problem for graph in lost]


def _size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """The first tensor's: where it is another, so are most of the others'."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            return arg.shape
    return None
