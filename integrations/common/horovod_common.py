"""The Horovod API that all frameworks share: names, reduce ops, ranks of a process.

Imports neither torch nor TensorFlow.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from deepytorch.integrations.common.contract import IntegrationError


class HorovodInternalError(RuntimeError):
    """A collective failed: sizes that differ, a rank that died, a timeout."""


class ReduceOp(enum.IntEnum):
    """How values of several ranks become one; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


def reduce_op(op: ReduceOp | int | None, average: bool | None = None) -> ReduceOp:
    """The op that was asked for, also by the deprecated argument `average`.

    Raises ValueError for both or an unknown one, IntegrationError for Adasum.
    """
    if average is not None:
        if op is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        warnings.warn(
            "average= is deprecated: use op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        op = ReduceOp.Average if average else ReduceOp.Sum
    chosen = ReduceOp.Average if op is None else ReduceOp(op)
    if chosen is ReduceOp.Adasum:
        raise IntegrationError(
            "horovod: Adasum is not supported: use op=hvd.Average and scale the learning rate, or "
            "stay with horovod.torch for it"
        )
    return chosen


@dataclass(frozen=True)
class RankPlacement:
    """The place of a rank among the nodes of its job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool

    @classmethod
    def among(cls, rank: int, nodes: Sequence[str]) -> RankPlacement:
        """Placement of `rank`; `nodes` has the node of every rank, by rank."""
        members: dict[str, list[int]] = {}
        for other, node in enumerate(nodes):
            members.setdefault(node, []).append(other)
        mine = members[nodes[rank]]
        local_rank = mine.index(rank)
        # Across: the ranks that have this local rank on their node.
        across = [ranks[local_rank] for ranks in members.values() if len(ranks) > local_rank]
        return cls(
            rank=rank,
            size=len(nodes),
            local_rank=local_rank,
            local_size=len(mine),
            cross_rank=across.index(rank),
            cross_size=len(across),
            is_homogeneous=len({len(ranks) for ranks in members.values()}) == 1,
        )


def no_such_feature(what: str, instead: str) -> IntegrationError:
    """The error for a name of Horovod's that is here only to say what to use."""
    return IntegrationError(f"horovod: {what} is not supported: {instead}")
