"""Outputs of a region's graphs that get gradients, as its backward passes have shown."""

from __future__ import annotations

from collections.abc import Callable

from torch import SymInt
from torch.fx import GraphModule

# Unusual backward passes, each computed anew by eager code, before the region is left alone; usual
# ones in between count half as much against that.
MOST_UNUSUAL = 3

Key = tuple[str, int]


class Usage:
    """One region's.

    Args:
        give_up: called with the reason where backward passes are mostly other ones.
    """

    def __init__(self, give_up: Callable[[str], None]) -> None:
        self._give_up = give_up
        self._known: dict[Key, frozenset[int]] = {}
        self._balance = 0

    @staticmethod
    def key(graph: GraphModule, places: list[int]) -> Key:
        """Equal for the same code, whatever sizes it is captured for."""
        return graph.code, len(places)

    def of(self, key: Key, places: list[int], *, is_dynamic: bool) -> frozenset[int] | None:
        """The outputs that get gradients; None where backward passes have to show it first."""
        if len(places) < 2:
            return frozenset(places)
        alike = [used for (_, number), used in self._known.items() if number == len(places)]
        found = self._known.get(key)
        if found is None and is_dynamic:  # torch could not compile it later for any size
            return alike[-1] if alike else frozenset(places)
        return found

    def note(self, key: Key, used: set[int]) -> None:
        """These outputs have got gradients."""
        self._known[key] = self._known.get(key, frozenset()) | used

    def count(self, is_unusual: bool) -> None:
        """Another backward pass over a border."""
        self._balance = self._balance + 2 if is_unusual else max(0, self._balance - 1)
        if self._balance >= 2 * MOST_UNUSUAL:
            self._give_up(
                "its backward passes are differentiated, or begin at ever other outputs, or a hook "
                "or a gradient of one output goes by another"
            )


def is_dynamic(inputs: object) -> bool:
    """Whether a graph was captured for any size."""
    return isinstance(inputs, list | tuple) and any(isinstance(value, SymInt) for value in inputs)
