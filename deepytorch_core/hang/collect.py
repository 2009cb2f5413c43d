"""Evidence of the ranks on this node: their flight records, processes and stacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from deepytorch_core.hang import evidence, processes, record, stacks
from deepytorch_core.hang.evidence import Rank
from deepytorch_core.hang.record import Record, RecordError

# So many of each group's newest operations travel and are shown, beside all unfinished ones.
_TAIL = 64


@dataclass(frozen=True)
class HungJob:
    """The processes on this node that belong together, by the job's name."""

    name: str
    records: tuple[Record, ...]

    @property
    def world_size(self) -> int:
        return max(member.world_size for member in self.records)

    def elsewhere(self) -> list[int]:
        """Ranks of the job without a process on this node that could be read or is known."""
        here = {member.rank for member in self.records}
        here |= {rank for member in self.records for rank in member.peers}
        return [rank for rank in range(self.world_size) if rank not in here]


def jobs(pids: Iterable[int] | None = None, name: str | None = None) -> list[HungJob]:
    """The jobs on this node: all, those that these processes are of, or the one called `name`.

    A process that a rank has started (a data loader's worker), or that has started ranks, is of
    their job.

    Raises RecordError for a given process that is of none, OSError for one that can't be looked
    into.
    """
    wanted = None if pids is None else {name for pid in pids for name in _names(pid)}
    found: dict[str, list[Record]] = {}
    for pid in record.find():
        with contextlib.suppress(OSError, RecordError):  # it may have ended meanwhile
            member = record.read(pid)
            found.setdefault(_name(member), []).append(member)
    return [
        HungJob(job, tuple(sorted(members, key=lambda member: member.rank)))
        for job, members in sorted(found.items())
        if (wanted is None or job in wanted) and name in (None, job)
    ]


def _names(pid: int) -> set[str]:
    """The jobs that a process is of: one, or those of all ranks that it has started."""
    try:
        return {_name(record.read(pid))}
    except record.NoRecordError as error:
        for above in processes.ancestors(pid):
            with contextlib.suppress(record.NoRecordError, OSError):
                return {_name(record.read(above))}
        below = set()
        for rank_pid in record.find():
            if pid in processes.ancestors(rank_pid):
                with contextlib.suppress(RecordError, OSError):  # it may have ended meanwhile
                    below.add(_name(record.read(rank_pid)))
        if not below:
            raise record.NoRecordError(
                f"{error}, and no rank has started it or was started by it: leave --pid out to "
                "see all jobs"
            ) from None
        return below


def _name(member: Record) -> str:
    # A process that made groups without saying who it is stands for itself.
    return member.job or f"process {member.pid}"


def ranks(
    records: Iterable[Record], *, stacks_limit_s: float | None = 2.0, gently: bool = False
) -> list[Rank]:
    """Evidence of the processes with these records, and of their peers that are gone.

    Stacks are waited for up to `stacks_limit_s`; with None they are not asked for. On a busy
    machine it takes longer to see that a process keeps the GIL than that it has no processor.
    `gently`: as for `stacks.ask`.
    """
    records = list(records)
    answers: dict[int, str] = {}
    if stacks_limit_s is not None:
        signals = {member.pid: member.signal for member in records}
        answers = stacks.ask_all(signals, limit_s=stacks_limit_s, gently=gently)
    found = {member.rank: _rank(member, answers.get(member.pid)) for member in records}
    for member in records:
        for peer, pid in member.peers.items():
            if peer not in found:
                state, detail = processes.state(pid)
                if state != evidence.GONE:
                    state, detail = evidence.MISSING, ": its flight record can't be read"
                found[peer] = Rank(peer, member.host, pid, state, detail)
    return [found[rank] for rank in sorted(found)]


def together(local: list[Rank], others: Iterable[Rank], elsewhere: list[int]) -> list[Rank]:
    """The ranks of this node, and those `elsewhere` as other nodes have told of them."""
    known = {rank.rank for rank in local}
    told = [rank for rank in others if rank.rank in elsewhere and rank.rank not in known]
    return sorted([*local, *told], key=lambda rank: rank.rank)


def _rank(member: Record, answer: str | None) -> Rank:
    """`answer`: its stacks; empty if it gave none, None if it was not asked."""
    state, detail = processes.state(member.pid)
    if answer == "" and state == evidence.RUNNING:
        detail = processes.main_thread(member.pid)
    return Rank(
        rank=max(member.rank, 0),
        host=member.host,
        pid=member.pid,
        process=state,
        detail=detail,
        idle_s=member.idle_s,
        groups=member.groups,
        operations=tail(member.operations),
        frames=stacks.main_thread(answer or ""),
        stacks=answer or "",
    )


def tail(operations: tuple[evidence.Operation, ...]) -> tuple[evidence.Operation, ...]:
    """The newest operations of each group, and all that have not ended, oldest first."""
    taken: dict[str, int] = {}
    kept = []
    for operation in reversed(operations):
        number = taken.get(operation.group, 0)
        if number < _TAIL or operation.state == evidence.ENTERED:
            kept.append(operation)
            taken[operation.group] = number + 1
    return tuple(reversed(kept))
