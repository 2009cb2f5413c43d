"""Finds the rank of a node that begins its collectives last, by all their flight records.

This serves operations that the core can't time: those on GPUs and of the stock backend. A record
says when the program called an operation. So this tells a rank whose program comes late (its data,
its processor) and says nothing of a GPU that is slow.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from deepytorch_core.hang import record
from deepytorch_core.hang.record import Calls, RecordError


@dataclass(frozen=True)
class Starts:
    """The last to come to a group's newest collectives that ranks of one node have in common.

    Attributes:
        group: the group's name.
        operations: how many were looked at.
        latest: the global rank that began most of them last; of several, who held up longest.
        times_last: how many.
        lag_us: in those, how much later than the rank before it, in the median.
    """

    group: str
    operations: int
    latest: int
    times_last: int
    lag_us: float


def of_this_node() -> tuple[Starts, ...]:
    """Those of this process's groups, with the ranks of its node; takes some milliseconds for each.

    Nothing where this process has no record, or others' can't be read.
    """
    try:
        own = record.calls(os.getpid())
    except (OSError, RecordError):
        return ()
    if not own.job:  # it has not said what it is part of
        return ()
    ranks = {own.rank: own}
    # Groups that never met in native code know no peers.
    for pid in own.peers.values() if own.peers else record.find():
        with contextlib.suppress(OSError, RecordError):  # it has ended
            peer = record.calls(pid)
            if peer.job == own.job:
                ranks.setdefault(peer.rank, peer)
    return of(ranks.values())


def of(calls: Iterable[Calls]) -> tuple[Starts, ...]:
    """The same of what these ranks called."""
    begun: dict[tuple[str, int, str], list[tuple[int, int]]] = defaultdict(list)
    members: Counter[str] = Counter()
    for caller in calls:
        members.update(caller.groups)
        for what, at_ns in caller.begun_ns.items():
            begun[what].append((at_ns, caller.rank))
    last: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for (group, *_), times in begun.items():
        if len(times) > 1 and len(times) == members[group]:
            *_, (before_ns, _), (at_ns, latest) = sorted(times)
            last[group].append((latest, (at_ns - before_ns) / 1e3))
    return tuple(_starts(group, seen) for group, seen in sorted(last.items()))


def _starts(group: str, seen: list[tuple[int, float]]) -> Starts:
    times = Counter(rank for rank, _ in seen)
    total = {rank: sum(lag for each, lag in seen if each == rank) for rank in times}
    latest = max(times, key=lambda rank: (times[rank], total[rank]))
    lag_us = median(lag for rank, lag in seen if rank == latest)
    return Starts(group, len(seen), latest, times[latest], lag_us)
