"""Sizes that a region is called with: those which come again are worth a graph of their own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

# So many that were seen once are remembered: a pass has layers, and batches have ever other sizes.
_MOST_SEEN = 256


class RegionSizes:
    """Those of one region.

    Args:
        limit: how many may have a graph of their own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[Hashable] = set()
        self._awaited: set[Hashable] = set()
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

    def await_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Helpers have a graph of a call with these."""
        self._awaited.add(_size_of(args, kwargs))

    def are_awaited(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether helpers have a graph of such a call, and it was not taken over yet."""
        return _size_of(args, kwargs) in self._awaited

    def take_over(self) -> None:
        """All that helpers have done is taken over."""
        self._awaited.clear()


def _size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """The first tensor's: where it is another, so are most of the others'."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            return arg.shape
    return None
