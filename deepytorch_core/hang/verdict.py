"""From what is known of each rank to the one sentence: who keeps the others waiting.

A pure function. It builds who waits for whom. A rank that is inside an operation waits for the
group's members that have not begun it, and a receive waits for its sender. Followed from the
longest wait, that ends in one of three ways. A rank waits for nobody, or can't go on at all. Ranks
wait for each other. Or all ranks of an operation are in it: then they differ in what they asked
for, or the program is not what is stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from deepytorch_core.hang import evidence, stacks, words
from deepytorch_core.hang.evidence import Operation, Rank

NO_HANG = "no hang"
NEVER_ENTERED = "never entered"
STOPPED = "stopped"
GONE = "gone"
MISSING = "missing"
MISMATCH = "mismatch"
CROSSED = "crossed"
ALL_INSIDE = "all inside"

# Ranks whose operations fail within so long of each other have failed of the same cause.
_TOGETHER_S = 5.0


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of this module's constants; `ranks` are those that the sentence blames.

    `group` and `sequence` say which operation the others wait in; empty and 0 where there is none.
    `operation` says it in words, where ranks never entered it.
    """

    kind: str
    sentence: str
    ranks: tuple[int, ...] = ()
    group: str = ""
    sequence: int = 0
    operation: str = ""


@dataclass(frozen=True)
class Wait:
    """Rank `rank` is inside `operation`, whose group's global ranks are `members`."""

    rank: int
    operation: Operation
    members: tuple[int, ...]

    @property
    def key(self) -> tuple[str, int, bool]:
        return self.operation.group, self.operation.sequence, self.operation.is_message


def judge(
    ranks: Iterable[Rank],
    *,
    failed: tuple[str, int, bool] | None = None,
    gave_up: str | None = None,
    least_s: float = 0.0,
) -> Verdict:
    """Judge who keeps the job waiting, from what is known of its ranks.

    Args:
        ranks: evidence of as many ranks as there is; a rank that should be there and is not may
            be left out.
        failed: group and number of an operation that has just timed out, and whether it is a
            message. Ranks whose call of it has failed count as waiting in it. Ranks of which
            another operation has just failed count as waiting in that one.
        gave_up: group on whose GPUs a kernel has just given up. The group's newest operation counts
            as waited in, also where all ranks have begun as many.
        least_s: waits that are younger are none.
    """
    return _Case(ranks, failed, gave_up, least_s).verdict()


def lasting(ranks: Iterable[Rank], earlier: Iterable[Rank]) -> list[Rank]:
    """These ranks, of whose operations those count as just begun that were not so at an earlier
    look: a wait that `judge` finds has lasted since then."""
    states = {
        (rank.rank, operation.group, operation.sequence, operation.is_message, operation.state)
        for rank in earlier
        for operation in rank.operations
    }

    def since(rank: Rank, operation: Operation) -> Operation:
        key = (operation.group, operation.sequence, operation.is_message, operation.state)
        return operation if (rank.rank, *key) in states else replace(operation, age_s=0.0)

    return [
        replace(rank, operations=tuple(since(rank, operation) for operation in rank.operations))
        for rank in ranks
    ]


def with_cause(found: Verdict, failed: Callable[[int], str | None]) -> str:
    """The sentence of a verdict; of a rank that has ended it says what had kept that waiting.

    Args:
        found: the verdict.
        failed: what a rank was told of its own operation that failed, if one did.
    """
    if found.kind != GONE or not found.ranks:
        return found.sentence
    cause = failed(found.ranks[0])
    return found.sentence + (f"; its own operation had failed: {cause}" if cause else "")


def is_same(verdict: Verdict, other: Verdict) -> bool:
    """Whether two looks came to the same."""
    return (verdict.kind, verdict.ranks, verdict.group, verdict.sequence) == (
        other.kind,
        other.ranks,
        other.group,
        other.sequence,
    )


class _Case:
    def __init__(
        self,
        ranks: Iterable[Rank],
        failed: tuple[str, int, bool] | None,
        gave_up: str | None,
        least_s: float,
    ) -> None:
        self.ranks = {rank.rank: rank for rank in ranks}
        self.failed = failed
        self.gave_up = gave_up
        self.least_s = least_s
        self.waits = {
            rank.rank: wait for rank in self.ranks.values() if (wait := self._wait_of(rank))
        }
        if not self.waits:
            self.waits = self._waits_on_devices()

    def verdict(self) -> Verdict:
        if not self.waits:
            return Verdict(NO_HANG, self._no_hang())
        # The longest wait leads to what holds up the rest.
        start = max(
            self.waits.values(),
            key=lambda wait: (not wait.operation.is_message, wait.operation.age_s),
        )
        path: list[Wait] = []
        wait = start
        while True:
            path.append(wait)
            differing = self._differ(wait)
            if differing is not None:
                return differing
            absent = self._absent(wait)
            if not absent and wait.operation.state == evidence.ISSUED:
                return Verdict(NO_HANG, self._no_hang())  # it may be through on some of them
            if not absent:
                return self._all_inside(wait)
            stuck = [rank for rank in absent if self._can_wait(rank)]
            free = [rank for rank in absent if rank not in stuck]
            if free:
                return self._never_entered(wait, free)
            following = self.waits[stuck[0]]
            if any(following.rank == earlier.rank for earlier in path):
                first = next(i for i, earlier in enumerate(path) if earlier.rank == following.rank)
                return self._crossed(path[first:])
            wait = following

    # These find the ranks that wait.

    def _wait_of(self, rank: Rank) -> Wait | None:
        """The operation that holds this rank: the oldest, of those that it waits for itself.

        Asynchronous ones may be under way while it does something else, and a receive may have
        been posted long before it is due.
        """
        inside = [
            operation
            for operation in rank.operations
            if operation.age_s >= self.least_s
            and self._is_inside(operation)
            and not (operation.is_message and operation.asynchronous)
            and rank.group(operation.group) is not None
        ]
        if not inside:
            return None
        chosen = min(
            inside,
            key=lambda each: (
                self._has_failed_elsewhere(each),
                each.is_message,
                each.asynchronous,
            ),
        )
        group = rank.group(chosen.group)
        assert group is not None
        return Wait(rank.rank, chosen, group.ranks)

    def _is_inside(self, operation: Operation) -> bool:
        return operation.state == evidence.ENTERED or self._has_just_failed(operation)

    def _has_just_failed(self, operation: Operation) -> bool:
        if operation.state != evidence.FAILED or self.failed is None:
            return False
        ended_age_s = operation.ended_age_s
        is_fresh = ended_age_s is not None and ended_age_s < _TOGETHER_S
        return is_fresh or not self._has_failed_elsewhere(operation)

    def _has_failed_elsewhere(self, operation: Operation) -> bool:
        """Whether it has failed, and is not the operation that is asked about."""
        this = (operation.group, operation.sequence, operation.is_message)
        return operation.state == evidence.FAILED and this != self.failed

    def _waits_on_devices(self) -> dict[int, Wait]:
        """Ranks whose newest operations on a device go beyond what some member has begun.

        The host knows of those only that they were begun. So as long as all ranks began the same
        there is nothing to see, unless a kernel says that it waited in vain.
        """
        alone: dict[int, Wait] = {}
        in_vain: dict[int, Wait] = {}
        for rank in self.ranks.values():
            for operation in rank.operations:
                group = rank.group(operation.group)
                is_begun = operation.state == evidence.ISSUED and not operation.is_message
                if group is None or not is_begun or operation.age_s < self.least_s:
                    continue
                wait = Wait(rank.rank, operation, group.ranks)
                if rank.rank not in alone and self._absent(wait):
                    alone[rank.rank] = wait
                if operation.group == self.gave_up:
                    in_vain[rank.rank] = wait
        return alone or in_vain

    def _can_wait(self, rank: int) -> bool:
        return rank in self.waits and not self._is_dead_or_stopped(rank)

    def _is_dead_or_stopped(self, rank: int) -> bool:
        known = self.ranks.get(rank)
        return known is not None and known.process in (
            evidence.STOPPED,
            evidence.TRACED,
            evidence.GONE,
        )

    def _is_known(self, rank: int) -> bool:
        known = self.ranks.get(rank)
        return known is not None and known.process != evidence.MISSING

    # For whom.

    def _absent(self, wait: Wait) -> list[int]:
        """The global ranks that `wait` waits for."""
        operation = wait.operation
        if operation.is_message:
            return self._message_peers(wait)
        absent = []
        for member in wait.members:
            known = self.ranks.get(member)
            group = known.group(operation.group) if known is not None else None
            if group is None or group.collectives < operation.sequence:
                absent.append(member)
        return absent

    def _message_peers(self, wait: Wait) -> list[int]:
        operation = wait.operation
        if operation.root == evidence.ANY_RANK:
            return [member for member in wait.members if member != wait.rank]
        if not 0 <= operation.root < len(wait.members):
            return []
        peer = wait.members[operation.root]
        # Its other half is there: then it is the transport, or tag and size.
        return [] if self._halves(wait, peer) is not None else [peer]

    def _halves(self, wait: Wait, peer: int) -> tuple[Operation, Operation] | None:
        """A message between the two that neither has ended: this rank's half, and `peer`'s.

        Two that belong together, if there are, else what they wait in. None where `peer` waits
        for something else.
        """
        mine = self._messages_to(wait, wait.rank, peer)
        theirs = self._messages_to(wait, peer, wait.rank)
        for half in (wait.operation, *mine):
            for other in theirs:
                if half.op != other.op and words.halves_fit(half, other):
                    return half, other
        there = self.waits.get(peer)
        if (
            there is not None
            and there.operation in theirs
            and there.operation.op != wait.operation.op
        ):
            return wait.operation, there.operation
        return None

    def _messages_to(self, wait: Wait, rank: int, peer: int) -> list[Operation]:
        """Return what `rank` sends to or receives from `peer` in `wait`'s group, unfinished."""
        known = self.ranks.get(rank)
        places = (evidence.ANY_RANK, wait.members.index(peer))
        return [
            each
            for each in (known.operations if known is not None else ())
            if each.is_message
            and each.group == wait.operation.group
            and each.root in places
            and each.age_s >= self.least_s
            and self._is_inside(each)
        ]

    # These choose the words.

    def _never_entered(self, wait: Wait, free: Sequence[int]) -> Verdict:
        operation = wait.operation
        # A rank of which something is known says more than one of which nothing is.
        ordered = sorted(
            free,
            key=lambda rank: (
                not self._is_dead_or_stopped(rank),
                not self._is_known(rank),
                rank not in self.ranks,
                rank,
            ),
        )
        first = ordered[0]
        known = self.ranks.get(first)
        if operation.is_message:
            what = words.message_not_answered(operation, wait.rank, any_of=len(free))
        else:
            what = f"never entered {words.operation(operation, self._group_text(wait))}"
        if known is None:
            sentence = (
                f"rank {first} {what}; nothing is known of it: it has no flight record on the "
                "nodes that were looked at, so it has not joined yet, exited, or runs elsewhere"
            )
            kind = MISSING
        else:
            sentence = f"{words.rank(known)} {what}; {words.state(known)}"
            kind = {
                evidence.STOPPED: STOPPED,
                evidence.TRACED: STOPPED,
                evidence.GONE: GONE,
                evidence.MISSING: MISSING,
            }.get(known.process, NEVER_ENTERED)
        others = [rank for rank in sorted(free) if rank != first]
        if others:
            sentence += f" (nor did {words.ranks(others)})"
        return Verdict(
            kind,
            sentence,
            tuple(sorted(free)),
            operation.group,
            operation.sequence,
            words.operation(operation, self._group_text(wait)),
        )

    def _all_inside(self, wait: Wait) -> Verdict:
        operation = wait.operation
        held = [rank for rank in wait.members if self._is_dead_or_stopped(rank)]
        this = words.operation(operation, self._group_text(wait))
        if held:
            known = self.ranks[held[0]]
            kind = GONE if known.process == evidence.GONE else STOPPED
            sentence = f"{words.rank(known)} does not go on in {this}: {words.state(known)}"
            return Verdict(kind, sentence, tuple(held), operation.group, operation.sequence)
        blocked = [
            rank
            for rank in wait.members
            if (known_rank := self.ranks.get(rank)) and known_rank.process == evidence.IN_KERNEL
        ]
        if operation.is_message:
            peer = wait.members[operation.root]
            halves = self._halves(wait, peer)
            assert halves is not None
            sentence = words.two_halves(wait.rank, halves[0], peer, halves[1])
            ranks = tuple(sorted((wait.rank, peer)))
            differ = not words.halves_fit(*halves)
            kind = MISMATCH if differ else ALL_INSIDE
            return Verdict(kind, sentence, ranks, operation.group, operation.sequence)
        sentence = (
            f"all {len(wait.members)} ranks are in {this}, alike, "
            f"{words.duration(operation.age_s)} by now: what is stuck is the network between them, "
            "a device or a kernel, not the program"
        )
        if blocked:
            known = self.ranks[blocked[0]]
            sentence += f"; {words.rank(known)}: {words.state(known)}"
        return Verdict(ALL_INSIDE, sentence, tuple(blocked), operation.group, operation.sequence)

    def _differ(self, wait: Wait) -> Verdict | None:
        """The first operation of the group that two of its ranks made differently."""
        name = wait.operation.group
        if wait.operation.is_message:
            return None
        tails = {
            member: {
                operation.sequence: operation
                for operation in known.operations
                if operation.group == name and not operation.is_message
            }
            for member in wait.members
            if (known := self.ranks.get(member)) is not None
        }
        numbers = sorted({number for tail in tails.values() for number in tail})
        for number in numbers:
            if number > wait.operation.sequence:
                break
            made = [(member, tail[number]) for member, tail in tails.items() if number in tail]
            refused = all(operation.state == evidence.FAILED for _, operation in made)
            if refused and (name, number, False) != self.failed:
                continue  # told to every rank then, and done with
            if len({words.signature(operation) for _, operation in made}) > 1:
                return self._mismatch(wait, made, number, tails)
        return None

    def _mismatch(
        self,
        wait: Wait,
        made: list[tuple[int, Operation]],
        number: int,
        tails: dict[int, dict[int, Operation]],
    ) -> Verdict:
        sides: dict[object, list[int]] = {}
        for member, operation in made:
            sides.setdefault(words.signature(operation), []).append(member)
        by_size = sorted(sides.values(), key=lambda side: (len(side), side))
        few, many = by_size[0], by_size[-1]
        of_few, of_many = tails[few[0]][number], tails[many[0]][number]
        sentence = (
            f"ranks differ in collective #{number} of {self._group_text(wait)}: "
            f"{words.ranks(few)} entered {words.call(of_few)}, "
            f"{words.ranks(many)} {words.call(of_many)}"
        )
        following = number + 1
        swapped = words.signature(of_few) == _signature_at(
            tails[many[0]], following
        ) or words.signature(of_many) == _signature_at(tails[few[0]], following)
        if swapped:
            sentence += ", the same operations in another order"
        place = self.ranks[few[0]]
        if stacks.where(place.frames) is not None:
            sentence += f"; {words.rank(place)}: {words.state(place)}"
        blamed = tuple(sorted(few)) if len(few) < len(many) else tuple(sorted(few + many))
        return Verdict(MISMATCH, sentence, blamed, wait.operation.group, number)

    def _crossed(self, cycle: Sequence[Wait]) -> Verdict:
        parts = [
            f"rank {wait.rank} is in {words.operation(wait.operation, self._group_text(wait))}"
            for wait in cycle
        ]
        members = sorted(wait.rank for wait in cycle)
        groups = {wait.operation.group for wait in cycle}
        why = (
            "they entered the operations of several groups in crossed order"
            if len(groups) > 1
            else "each waits for what the other has not begun"
        )
        first = cycle[0].operation
        sentence = f"{words.ranks(members)} wait for each other: {' and '.join(parts)}; {why}"
        return Verdict(CROSSED, sentence, tuple(members), first.group, first.sequence)

    def _no_hang(self) -> str:
        held = [rank for rank in self.ranks.values() if self._is_dead_or_stopped(rank.rank)]
        if held:
            return (
                f"no rank waits in an operation, but {words.rank(held[0])} does not go on: "
                f"{words.state(held[0])}"
            )
        return f"no hang: none of {len(self.ranks)} ranks waits in an operation"

    def _group_text(self, wait: Wait) -> str:
        known = self.ranks[wait.rank].group(wait.operation.group)
        assert known is not None
        return words.group(known)


def _signature_at(tail: dict[int, Operation], number: int) -> object:
    operation = tail.get(number)
    return words.signature(operation) if operation is not None else None
