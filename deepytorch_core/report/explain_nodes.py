"""A collective's plan between nodes, as the native core tells of the last one it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Phase:
    """`where` is within or between nodes; a rank has `bytes` in hand at a time."""

    where: str
    what: str
    bytes: int


@dataclass(frozen=True)
class BetweenNodes:
    """A plan of a group that spans nodes; ranks are those of the group.

    `nodes` are each node's ranks, and `rails` the ranks that exchange with each other, over
    `sockets` connections between two of them. The message moves in `pieces` of up to `piece_bytes`,
    `under_way` of them between nodes while the node works on the next ones. `sent_bytes` are those
    of the node that sends the most.
    """

    nodes: tuple[tuple[int, ...], ...]
    sockets: int
    way: str
    rails: tuple[tuple[int, ...], ...]
    pieces: int
    piece_bytes: int
    under_way: int
    sent_bytes: int
    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, op: str, algorithm: str, groups: Sequence[Mapping[str, Any]]) -> Self | None:
        """Read `_core.node_groups()` for that plan; None if none of theirs is it."""
        for group in groups:
            for plan in group["plans"]:
                if (plan["op"], plan["algorithm"]) == (op, algorithm):
                    return cls._read(group, plan)
        return None

    @classmethod
    def _read(cls, group: Mapping[str, Any], plan: Mapping[str, Any]) -> Self:
        return cls(
            nodes=tuple(map(tuple, group["nodes"])),
            sockets=group["sockets"],
            way=plan["way"],
            rails=tuple(map(tuple, plan["rails"])),
            pieces=plan["pieces"],
            piece_bytes=plan["piece_bytes"],
            under_way=plan["under_way"],
            sent_bytes=plan["sent_bytes"],
            phases=tuple(Phase(**phase) for phase in plan["phases"]),
        )
