"""The stages in which GPUs of several nodes may go through NCCL (csrc/c10d/hierarchy.hpp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from deepytorch_core.report.explain_nodes import Phase


@dataclass(frozen=True)
class Stages:
    """The stages of one collective; `phases` have a rank's bytes in each, which may go in pieces.

    A node sends `sent_bytes` over the network, and in one piece, which for all but an all_to_all is
    one ring through all ranks, `ring_bytes`.
    `why_not` is "" where stages are possible: then option `collectives` and the tuner decide.
    """

    phases: tuple[Phase, ...]
    sent_bytes: int
    ring_bytes: int
    why_not: str

    @classmethod
    def of(cls, op: str, num_bytes: int, ranks_per_node: Sequence[int]) -> Self:
        """The stages of `num_bytes`, as nccl-tests counts them, on nodes of so many ranks."""
        nodes, local, ranks = len(ranks_per_node), ranks_per_node[0], sum(ranks_per_node)
        reason = why_not(op, num_bytes, ranks_per_node)
        if reason:
            return cls((), 0, 0, reason)
        parts = Phase(
            "within nodes", f"{op} of each node's parts, {nodes} in all", num_bytes // nodes
        )
        rail = Phase("between nodes", f"{op} of ranks in the same place", num_bytes // local)
        phases: tuple[Phase, ...]
        if op == "all_to_all":
            # As many bytes, but each rank sends one message to each node instead of `local`.
            sent = local * num_bytes * (nodes - 1) // nodes
            phases = (
                Phase("within nodes", "all_to_all: what is for a place goes there", num_bytes),
                Phase("between nodes", "all_to_all of ranks in the same place", num_bytes),
            )
            return cls(phases, sent_bytes=sent, ring_bytes=sent, why_not="")
        if op == "all_gather":
            phases = (rail, parts)
        elif op == "reduce_scatter":
            phases = (parts, rail)
        else:
            phases = (
                Phase("within nodes", "reduce_scatter", num_bytes),
                rail,
                Phase("within nodes", "all_gather", num_bytes),
            )
        times = 2 if op == "all_reduce" else 1
        return cls(
            phases,
            sent_bytes=times * num_bytes * (nodes - 1) // nodes,
            ring_bytes=times * num_bytes * (ranks - 1) // ranks,
            why_not="",
        )


def why_not(op: str, num_bytes: int, ranks_per_node: Sequence[int]) -> str:
    """Why GPUs of these nodes leave the collective to NCCL in one piece; "" where they may not."""
    from deepytorch_core import _core

    if op not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        return "stages are for all_reduce, all_gather, reduce_scatter and all_to_all"
    if len(set(ranks_per_node)) > 1:
        return "stages need equally many ranks on each node"
    if ranks_per_node[0] < 2:
        return "one rank on each node: nothing can be done within nodes"
    if num_bytes < _core.staged_bytes:
        return f"stages are for {_core.staged_bytes >> 20} MiB or more in all"
    return ""
