"""Says who keeps this process waiting while it waits, which its limit may allow for half an hour.

A thread wakes up every few seconds and asks the core for how long this process has been in an
operation. Most of the time that is all. If the wait is long, the first of this node's ranks that
wait reads the flight records of all. That rank prints the verdict, once and then more and more
rarely. A group's first operation, where its ranks meet, is told of soon. Nothing is ended by that:
a rank that prepares its data for a quarter of an hour is none of our business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from deepytorch_core.base import unlisted
from deepytorch_core.base.console import say
from deepytorch_core.hang import collect, evidence, inquiry, verdict, words
from deepytorch_core.hang.evidence import ENDED, Operation, Rank

START_S = 3.0
"""A wait in a group's first operation that is so long is told of."""
FIRST_S = 45.0
"""A wait that is so long is told of, with 15 s left until it has lasted a minute."""
AGAIN = 4
"""So many times as long it is told of once more."""
# The same where another rank had it to tell: that one may wait for something else.
_NEXT_TRY = 1.25
# Ranks that began to wait within so long of each other leave it to the first of them.
_TOGETHER_S = 5.0
_PERIOD_S = 2.0
_LEAST_PAUSE_S = 0.1
_STACKS_LIMIT_S = 2.0


class HangWatch:
    """The thread of one job, from now until `stop`.

    Args:
        job: its name in the flight records.
        rank: this process's in the default group.
        asks: whether ranks on other nodes are to be asked, and can be.
    """

    def __init__(self, job: str, rank: int, *, asks: Callable[[], bool]) -> None:
        self._job = job
        self._rank = rank
        self._asks = asks
        self._over = threading.Event()
        self._thread = unlisted.Thread(self._run, name="deepytorch-waits")
        self._thread.start()

    def stop(self, *, limit_s: float) -> None:
        """End the thread, and wait so long for it where it is just looking."""
        self._over.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        from deepytorch_core import _core

        due_s, before_s, pause_s = self._soonest_s(), 0.0, self._soonest_s()
        while not self._over.wait(pause_s):
            waited_s = _core.longest_wait_s()
            if waited_s < before_s:
                due_s = self._soonest_s()  # another wait
            before_s = waited_s
            if waited_s >= due_s:
                is_start = waited_s < FIRST_S
                try:
                    has_told = self._tell(is_start=is_start)
                except Exception as error:  # nobody asked, so nobody is to be bothered
                    say(f"a wait was not explained: {error}", level="debug")
                    has_told = False
                due_s = (AGAIN if has_told else _NEXT_TRY) * waited_s
                due_s = FIRST_S if is_start else due_s
            pause_s = max(_LEAST_PAUSE_S, min(_PERIOD_S, FIRST_S, due_s - waited_s))

    @staticmethod
    def _soonest_s() -> float:
        return min(START_S, FIRST_S)

    def _tell(self, *, is_start: bool) -> bool:
        """Say who is waited for, if this rank is to say it and somebody is.

        Args:
            is_start: only in a group's first operation.
        """
        job = next(iter(collect.jobs(name=self._job)), None)
        if job is None:
            return False
        due_s = START_S if is_start else FIRST_S
        least_s = due_s - _TOGETHER_S if due_s > _TOGETHER_S else due_s / 2
        waiting = {
            rank.rank: operation
            for rank in collect.ranks(job.records, stacks_limit_s=None)
            if (operation := longest_wait(rank)) is not None
            and operation.age_s >= least_s
            and (_is_first(rank, operation) or not is_start)
        }
        if not waiting or min(waiting) != self._rank:
            return False
        ranks, problem = _all_ranks(job, asks=self._asks())
        mine = next(rank for rank in ranks if rank.rank == self._rank)
        found = verdict.judge(ranks, least_s=least_s)
        operation = longest_wait(mine)
        if operation is None or found.kind == verdict.NO_HANG or self._over.is_set():
            return False
        say(_sentence(mine, operation, found.sentence, problem), level="warning")
        return True


def longest_wait(rank: Rank) -> Operation | None:
    """The operation that a rank has waited in for longest, as `_core.longest_wait_s` counts.

    None where it waits in none, or can't go on by itself.
    """
    if rank.process in (evidence.STOPPED, evidence.TRACED, evidence.GONE):
        return None
    newest = rank.operations[-1:]
    waits = [
        operation
        for operation in rank.operations
        if _is_wait(operation) or (_is_issued(operation) and operation in newest)
    ]
    return max(waits, key=lambda operation: operation.age_s, default=None)


def _is_first(rank: Rank, operation: Operation) -> bool:
    """Whether the rank has ended no operation of the group yet."""
    group = rank.group(operation.group)
    known = [call for call in rank.operations if call.group == operation.group]
    begun = 0 if group is None else group.collectives + group.messages
    return begun <= len(known) and not any(call.state == ENDED for call in known)


def _is_wait(operation: Operation) -> bool:
    ends_unseen = operation.is_message or operation.how == evidence.DELEGATED
    is_waited_for = not operation.asynchronous or not ends_unseen
    return operation.state == evidence.ENTERED and is_waited_for


def _is_issued(operation: Operation) -> bool:
    on_device = operation.on_device and not operation.is_message
    return operation.state == evidence.ISSUED and on_device


def _all_ranks(job: collect.HungJob, *, asks: bool) -> tuple[list[Rank], str]:
    """Evidence of every rank, and why the other nodes' could not be had."""
    elsewhere = job.elsewhere()
    answer = inquiry.EvidenceReply()
    if elsewhere and asks:
        answer = inquiry.ask([record.pid for record in job.records], how=inquiry.GENTLY)
    local = collect.ranks(job.records, stacks_limit_s=_STACKS_LIMIT_S, gently=True)
    return collect.together(local, answer.ranks, elsewhere), answer.problem


def _sentence(mine: Rank, operation: Operation, found: str, problem: str) -> str:
    group = mine.group(operation.group)
    what = words.operation(operation, words.group(group) if group is not None else operation.group)
    place = words.place(mine)
    text = f"rank {mine.rank} has waited {words.duration(operation.age_s)} in {what}"
    text += f" at {place}" if place else ""
    # It may yet come.
    text += f": {found.replace(f'never entered {what}', 'has not entered it')}"
    text += f" (other nodes could not be asked: {problem})" if problem else ""
    left_s = operation.limit_s - operation.age_s
    if left_s > 0:
        limit = words.duration(operation.limit_s)
        text += f"; the time limit of {limit} ends the wait in {words.duration(left_s)}"
    return text
