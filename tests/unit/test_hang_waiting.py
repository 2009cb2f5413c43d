"""When a wait is told of, by whom, and what counts as one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from deepytorch_core import _core
from deepytorch_core.hang import collect, evidence, inquiry, waiting
from deepytorch_core.hang.evidence import Frame, Group, Operation, Rank
from deepytorch_core.hang.record import Record

REDUCE = Operation(
    **{"group": "0", "sequence": 7, "op": "all_reduce", "dtype": "float32", "reduce_op": "sum"},
    **{"count": 3, "bytes": 12, "root": 0, "tag": 0, "uneven": False, "on_device": False},
    **{"asynchronous": False, "how": evidence.NATIVE, "state": evidence.ENTERED},
    **{"age_s": 50.0, "ended_age_s": None, "limit_s": 1800.0},
)


def changed(**changes: Any) -> Operation:
    return dataclasses.replace(REDUCE, **changes)


def rank(number: int, *operations: Operation, **more: Any) -> Rank:
    begun = max((operation.sequence for operation in operations), default=6)
    groups = (Group("0", "", (0, 1, 2), begun, 0),)
    return Rank(number, "a", 100 + number, groups=groups, operations=operations, **more)


ENDED = changed(state=evidence.ENDED, ended_age_s=1.0)
ISSUED = changed(on_device=True, state=evidence.ISSUED)


@pytest.mark.parametrize(
    ("operations", "age_s"),
    [
        ([REDUCE], 50.0),
        ([changed(asynchronous=True)], 50.0),
        ([changed(asynchronous=True, how="")], 50.0),
        ([changed(asynchronous=True, how=evidence.DELEGATED)], None),
        ([changed(how=evidence.DELEGATED)], 50.0),
        ([changed(op="recv", asynchronous=True)], None),
        ([changed(op="recv")], 50.0),
        ([REDUCE, changed(age_s=60.0), ENDED], 60.0),
        ([ENDED], None),
        ([ISSUED], 50.0),
        ([ISSUED, ENDED], None),
        ([changed(on_device=True, state=evidence.ISSUED, op="send")], None),
        ([], None),
    ],
)
def test_what_counts_as_waited_in(operations: list[Operation], age_s: float | None) -> None:
    found = waiting.longest_wait(rank(0, *operations))
    assert (found.age_s if found is not None else None) == age_s


@pytest.mark.parametrize("process", [evidence.STOPPED, evidence.TRACED, evidence.GONE])
def test_who_can_not_speak_is_not_waited_for_to_speak(process: str) -> None:
    assert waiting.longest_wait(rank(0, REDUCE, process=process)) is None


class Clock:
    """Stands in for the event of a watch: time passes where it waits."""

    def __init__(self, end_s: float) -> None:
        self.now_s = 0.0
        self.looks = 0
        self._end_s = end_s

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        self.looks += 1
        return self.now_s > self._end_s

    def is_set(self) -> bool:
        return False


def told(
    monkeypatch: pytest.MonkeyPatch,
    waits: list[tuple[float, float]],
    *,
    by_me: bool = True,
    starts: bool = False,
) -> list[float]:
    """How old each wait was when it was told of; `waits` begin and end at these times.

    As any wait or, with `starts`, as one in a group's first operation.
    """
    clock, found = Clock(waits[-1][1] + 100), []

    def age_s() -> float:
        return max((clock.now_s - at for at, end in waits if at <= clock.now_s < end), default=0.0)

    monkeypatch.setattr(_core, "longest_wait_s", age_s)
    watch = object.__new__(waiting.HangWatch)
    watch._over = clock  # type: ignore[assignment]

    def tell(*, is_start: bool) -> bool:
        if is_start is starts:
            found.append(age_s())
        return by_me

    monkeypatch.setattr(watch, "_tell", tell, raising=False)
    watch._run()
    # Somebody who looks all the time costs something.
    assert clock.looks < clock.now_s / 1.8
    return found


@pytest.mark.parametrize("began_s", [0.0, 3.0, 9.99, 1234.5])
def test_a_wait_is_told_of_before_a_minute_is_over_and_then_more_rarely(
    monkeypatch: pytest.MonkeyPatch, began_s: float
) -> None:
    ages = told(monkeypatch, [(began_s, began_s + 3700)])
    assert [round(age / 5) * 5 for age in ages] == [45, 180, 720, 2880]
    assert ages[0] < 46


def test_who_left_it_to_another_looks_again_within_the_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ages = told(monkeypatch, [(0, 3600)], by_me=False)
    assert [round(age) for age in ages[:3]] == [45, 56, 70]
    assert len(ages) < 22  # an hour long


def test_each_wait_is_told_of_and_short_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = told(monkeypatch, [(5, 49), (60, 161), (170, 200), (201, 245), (300, 390)])
    assert [round(age) for age in ages] == [45, 45]


def test_a_start_is_told_of_within_seconds_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = told(monkeypatch, [(5, 7), (9.5, 99.0), (100, 104.9), (106, 3000)], starts=True)
    assert len(ages) == 3
    assert max(ages) < 5.0


def speak(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own: int,
    *ranks: Rank,
    is_start: bool = False,
) -> str:
    """Return what rank `own` says, with these ranks on its node."""
    records = tuple(
        Record(seen.pid, seen.rank, 3, 0, "a", "", "job", {}, 0, 0.0, seen.groups, seen.operations)
        for seen in ranks
    )
    monkeypatch.setattr(collect, "jobs", lambda name: [collect.HungJob(name, records)])
    monkeypatch.setattr(collect, "ranks", lambda records, **how: list(ranks))
    watch = object.__new__(waiting.HangWatch)
    watch._job, watch._rank, watch._over = "job", own, Clock(1.0)  # type: ignore[assignment]
    watch._asks = lambda: True
    watch._tell(is_start=is_start)
    return capsys.readouterr().err


PREPARES = Frame("/home/u/train.py", 31, "main", "tokenize(files)", mine=True)
ELSE = Frame("/home/u/train.py", 57, "main", "loss.backward()", mine=True)


def test_the_first_of_a_node_says_who_is_missing_and_how_long_it_may_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = rank(2, idle_s=51.0, frames=(PREPARES,))
    ranks = [rank(1, REDUCE, frames=(ELSE,)), rank(0, REDUCE, frames=(ELSE,)), late]
    assert speak(monkeypatch, capsys, 0, *ranks) == (
        "deepytorch: rank 0 has waited 50 s in all_reduce #7 of group 0 (12 bytes float32) at "
        "train.py:57 loss.backward(): rank 2 (node a, pid 102) has not entered it; it is in "
        "train.py:31 tokenize(files) for 51 s; the time limit of 1800 s ends the wait in 1750 s\n"
    )
    assert speak(monkeypatch, capsys, 1, *ranks) == ""
    assert speak(monkeypatch, capsys, 2, *ranks) == ""
    # A rank that began to wait a moment later leaves it to the first; one much later does not.
    assert speak(monkeypatch, capsys, 1, rank(0, changed(age_s=41.0)), *ranks[::2]) == ""
    said = speak(monkeypatch, capsys, 1, rank(0, changed(age_s=9.0)), *ranks[::2])
    assert said.startswith("deepytorch: rank 1 has waited 50 s in")


def test_of_short_waits_only_those_in_a_groups_first_operation_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = changed(sequence=1, age_s=4.0)
    ended = changed(sequence=1, age_s=9.0, state=evidence.ENDED, ended_age_s=8.0)
    second = changed(sequence=2, age_s=4.0)
    said = speak(monkeypatch, capsys, 0, rank(0, first), rank(1), rank(2), is_start=True)
    assert said.startswith("deepytorch: rank 0 has waited 4.0 s in all_reduce #1 of group 0")
    for operations in ((ended, second), (changed(age_s=4.0),)):  # the newest of many, the last one
        assert speak(monkeypatch, capsys, 0, rank(0, *operations), rank(1), is_start=True) == ""
    # A rank that began as early, but is no start, does not keep the others from saying it.
    others = (rank(0, ended, second), rank(1, first), rank(2))
    assert "rank 1 has waited 4.0 s" in speak(monkeypatch, capsys, 1, *others, is_start=True)


def test_what_has_no_limit_or_no_stack_is_told_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = speak(monkeypatch, capsys, 0, rank(0, changed(limit_s=0.0)), rank(1, ENDED), rank(2))
    assert said == (
        "deepytorch: rank 0 has waited 50 s in all_reduce #7 of group 0 (12 bytes float32): rank 2 "
        "(node a, pid 102) has not entered it; it is outside of any operation for 0.0 s, and gave "
        "no Python stack\n"
    )


def test_nothing_is_said_where_all_of_a_devices_operations_were_begun_by_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speak(monkeypatch, capsys, 0, *(rank(number, ISSUED) for number in range(3))) == ""
    said = speak(monkeypatch, capsys, 0, rank(0, ISSUED), rank(1, ISSUED), rank(2))
    assert "rank 2 (node a, pid 102) has not entered it" in said


def test_that_other_nodes_can_not_be_asked_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def ask(pids: list[int], *, how: str) -> inquiry.EvidenceReply:
        asked.append((pids, how))
        return inquiry.EvidenceReply(problem="the store is gone")

    monkeypatch.setattr(inquiry, "ask", ask)
    said = speak(monkeypatch, capsys, 0, rank(0, REDUCE), rank(1, REDUCE))
    assert asked == [([100, 101], inquiry.GENTLY)]
    assert "rank 2 has not entered it; nothing is known of it" in said
    assert "(other nodes could not be asked: the store is gone)" in said
