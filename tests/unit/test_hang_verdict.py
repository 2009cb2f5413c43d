"""Tests of who keeps whom waiting, by made-up records: one for each way a job can hang."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from deepytorch_core.hang import evidence, verdict
from deepytorch_core.hang.evidence import Frame, Group, Operation, Rank

WORLD = (0, 1, 2, 3)
MINE = Frame("/home/u/train.py", 88, "main", "next(loader)", mine=True)
TORCH = Frame("/lib/site-packages/torch/utils/data.py", 7, "_next", "wait()")


def op(sequence: int, name: str = "all_reduce", group: str = "dp", **changes: Any) -> Operation:
    values = {
        "group": group,
        "sequence": sequence,
        "op": name,
        "dtype": "bfloat16",
        "reduce_op": "sum" if name == "all_reduce" else "",
        "count": 32_000_000,
        "bytes": 64_000_000,
        "root": 0,
        "tag": 0,
        "uneven": False,
        "on_device": False,
        "asynchronous": False,
        "how": "native",
        "state": evidence.ENDED,
        "age_s": 1000.0 - sequence,
        "ended_age_s": 999.0 - sequence,
    }
    return Operation(**(values | changes))


def inside(sequence: int, name: str = "all_reduce", group: str = "dp", **changes: Any) -> Operation:
    changes = {"state": evidence.ENTERED, "age_s": 312.0, "ended_age_s": None} | changes
    return op(sequence, name, group, **changes)


def rank(
    number: int,
    *operations: Operation,
    groups: dict[str, tuple[int, ...]] | None = None,
    **more: Any,
) -> Rank:
    """A rank with these operations; its counters follow from them."""
    groups = groups or {"dp": WORLD}

    def most(name: str, *, messages: bool) -> int:
        found = [o.sequence for o in operations if o.group == name and o.is_message is messages]
        return max(found, default=0)

    tables = tuple(
        Group(name, "", members, most(name, messages=False), most(name, messages=True))
        for name, members in groups.items()
    )
    values = {"host": "b", "pid": 4700 + number, "idle_s": 312.0, "frames": (MINE,)} | more
    return Rank(number, groups=tables, operations=operations, **values)


def waiting(*numbers: int, at: int = 5, **changes: Any) -> list[Rank]:
    return [rank(number, op(at - 1), inside(at, **changes)) for number in numbers]


def judge(ranks: list[Rank], **options: Any) -> verdict.Verdict:
    """The verdict, which must not depend on the order of the evidence."""
    found = verdict.judge(ranks, **options)
    shuffled = ranks[:]
    random.Random(3).shuffle(shuffled)
    assert verdict.judge(shuffled, **options).kind == found.kind
    return found


def test_a_rank_that_never_entered() -> None:
    found = judge([*waiting(0, 1, 3, at=1234), rank(2, op(1233), frames=(TORCH, MINE))])
    assert found == verdict.Verdict(
        verdict.NEVER_ENTERED,
        "rank 2 (node b, pid 4702) never entered all_reduce #1234 of group dp (64 MB bfloat16); "
        "it is in train.py:88 next(loader) for 312 s",
        (2,),
        "dp",
        1234,
        "all_reduce #1234 of group dp (64 MB bfloat16)",
    )


def test_a_rank_that_never_entered_anything() -> None:
    found = judge([*waiting(0, 1, 2, at=1), rank(3)])
    assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (3,))


def test_several_ranks_that_never_entered() -> None:
    found = judge([*waiting(0, 2), rank(1, op(4)), rank(3, op(4))])
    assert found.ranks == (1, 3)
    assert "rank 1 (" in found.sentence
    assert found.sentence.endswith("(nor did rank 3)")


def test_a_rank_far_behind() -> None:
    """The others went on asynchronously; what the slow one lacks first is named."""
    ahead = [
        rank(
            number,
            op(4),
            *(inside(each, asynchronous=True, age_s=320.0 - each) for each in range(5, 40)),
        )
        for number in (0, 1, 2)
    ]
    found = judge([*ahead, rank(3, op(4))])
    assert (found.kind, found.ranks, found.sequence) == (verdict.NEVER_ENTERED, (3,), 5)


@pytest.mark.parametrize(
    ("process", "kind", "words"),
    [
        (evidence.STOPPED, verdict.STOPPED, "kill -CONT 4702"),
        (evidence.TRACED, verdict.STOPPED, "debugger"),
        (evidence.GONE, verdict.GONE, "has ended"),
        (evidence.IN_KERNEL, verdict.NEVER_ENTERED, "in the kernel"),
    ],
)
def test_processes_that_can_not_go_on(process: str, kind: str, words: str) -> None:
    found = judge([*waiting(0, 1, 3), rank(2, op(4), process=process, frames=())])
    assert (found.kind, found.ranks) == (kind, (2,))
    assert words in found.sentence
    assert "never entered all_reduce #5" in found.sentence


def test_a_rank_that_is_stopped_inside_the_operation() -> None:
    held = dataclasses.replace(waiting(2)[0], process=evidence.STOPPED)
    found = judge([*waiting(0, 1, 3), held])
    assert (found.kind, found.ranks) == (verdict.STOPPED, (2,))
    assert "does not go on in all_reduce #5" in found.sentence


def test_a_rank_of_which_nothing_is_known() -> None:
    found = judge(waiting(0, 1, 3))
    assert (found.kind, found.ranks) == (verdict.MISSING, (2,))
    gone = Rank(2, "b", 4702, evidence.GONE)
    assert judge([*waiting(0, 1, 3), gone]).kind == verdict.GONE


def test_a_rank_without_a_stack() -> None:
    found = judge([*waiting(0, 1, 3), rank(2, op(4), frames=())])
    assert "gave no Python stack" in found.sentence


DIFFERENT = {
    "operation": (inside(5), inside(5, "broadcast"), "broadcast (32000000 x bfloat16, root 0)"),
    "size": (inside(5), inside(5, count=7), "all_reduce (7 x bfloat16, sum)"),
    "dtype": (inside(5), inside(5, dtype="float32"), "32000000 x float32"),
    "reduce op": (inside(5), inside(5, reduce_op="max"), "max"),
    "root": (inside(5, "broadcast"), inside(5, "broadcast", root=2), "root 2"),
    "barrier": (inside(5), inside(5, "barrier"), "entered barrier,"),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_ranks_in_different_operations(difference: str) -> None:
    usual, other, words = DIFFERENT[difference]
    found = judge([rank(n, op(4), other if n == 2 else usual) for n in WORLD])
    assert (found.kind, found.ranks, found.sequence) == (verdict.MISMATCH, (2,), 5)
    assert words in found.sentence
    assert "ranks 0, 1 and 3" in found.sentence
    assert "train.py:88" in found.sentence


def test_operations_in_another_order() -> None:
    others = [rank(n, op(5), inside(6, "broadcast")) for n in (0, 1, 3)]
    found = judge([*others, rank(2, op(5, "broadcast"), inside(6))])
    assert (found.kind, found.sequence) == (verdict.MISMATCH, 5)
    assert "in another order" in found.sentence


def test_a_skipped_operation_shows_where_ranks_first_differ() -> None:
    """Rank 2 left one out and was taken for a participant of the next."""
    others = [rank(n, op(5), inside(6, "broadcast"), frames=()) for n in (0, 1, 3)]
    found = judge([*others, rank(2, op(5, "broadcast"), frames=())])
    assert (found.kind, found.ranks, found.sequence) == (verdict.MISMATCH, (2,), 5)


def test_uneven_parts_may_differ() -> None:
    ranks = [
        rank(n, op(3, "all_to_all", count=n), op(4, "all_gather", count=n, uneven=True), inside(5))
        for n in (0, 1, 3)
    ]
    found = judge([*ranks, rank(2, op(4, "all_gather", count=2, uneven=True))])
    assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (2,))


def test_a_mismatch_that_was_reported_is_no_news() -> None:
    refused = [op(3, state=evidence.FAILED, count=n) for n in WORLD]
    found = judge(
        [*(rank(n, refused[n], inside(5)) for n in (0, 1, 3)), rank(2, refused[2], op(4))]
    )
    assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (2,))


TWO_GROUPS = {"dp": (0, 1), "tp": (0, 1)}


def test_crossed_order_of_two_groups() -> None:
    found = judge(
        [
            rank(0, op(4), inside(5), groups=TWO_GROUPS),
            rank(1, op(4), inside(7, "all_gather", "tp"), groups=TWO_GROUPS),
        ]
    )
    assert (found.kind, found.ranks) == (verdict.CROSSED, (0, 1))
    assert "all_reduce #5 of group dp" in found.sentence
    assert "all_gather #7 of group tp" in found.sentence
    assert "crossed order" in found.sentence


def test_crossed_order_of_three_ranks() -> None:
    groups = {"a": (0, 1), "b": (1, 2), "c": (2, 0)}
    names = ("a", "b", "c")
    ranks = [rank(n, inside(1, group=names[n]), groups=groups) for n in range(3)]
    found = judge(ranks)
    assert (found.kind, found.ranks) == (verdict.CROSSED, (0, 1, 2))


def test_a_rank_stuck_in_another_group_leads_to_who_holds_that_up() -> None:
    data = (0, 1, 2)
    groups = {"dp": data, "tp": (2, 3)}
    ranks = [rank(n, op(4), inside(5), groups={"dp": data}) for n in (0, 1)]
    ranks += [rank(2, op(4), inside(9, "broadcast", "tp"), groups=groups)]
    ranks += [rank(3, op(8, "broadcast", "tp"), groups={"tp": (2, 3)})]
    found = judge(ranks)
    assert (found.kind, found.ranks, found.group) == (verdict.NEVER_ENTERED, (3,), "tp")


def test_a_free_rank_is_blamed_before_one_that_waits_itself() -> None:
    groups = {"dp": WORLD, "tp": (0, 1)}
    ranks = [*waiting(2), rank(0, op(4), inside(5), groups=groups)]
    ranks += [rank(1, op(4), inside(1, group="tp"), groups=groups), rank(3, op(4))]
    found = judge(ranks)
    assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (3,))


def test_all_in_the_same_operation() -> None:
    found = judge(waiting(*WORLD))
    assert (found.kind, found.ranks) == (verdict.ALL_INSIDE, ())
    assert "network" in found.sentence
    assert "312 s" in found.sentence


def message(name: str, peer: int, **changes: Any) -> Operation:
    return inside(1, name, root=peer, **changes)


def test_a_message_that_was_never_sent() -> None:
    found = judge([rank(0, message("recv", 1)), rank(1, op(4))])
    assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (1,))
    assert "never sent to rank 0, which waits in recv #1" in found.sentence


def test_a_message_that_was_never_received() -> None:
    found = judge([rank(0, message("send", 1)), rank(1, op(4), process=evidence.STOPPED)])
    assert (found.kind, found.ranks) == (verdict.STOPPED, (1,))
    assert "never received from rank 0" in found.sentence


def test_messages_with_different_tags() -> None:
    found = judge([rank(0, message("recv", 1, tag=3)), rank(1, message("send", 0, tag=4))])
    assert (found.kind, found.ranks) == (verdict.MISMATCH, (0, 1))
    assert "tag 3" in found.sentence
    assert "tag 4" in found.sentence


def test_a_message_that_does_not_get_through() -> None:
    found = judge([rank(0, message("recv", 1)), rank(1, message("send", 0))])
    assert found.kind == verdict.ALL_INSIDE


def test_two_ranks_that_both_send_first() -> None:
    found = judge([rank(0, message("send", 1)), rank(1, message("send", 0))])
    assert (found.kind, found.ranks) == (verdict.CROSSED, (0, 1))


def test_a_pipeline_leads_to_its_slowest_stage() -> None:
    ranks = [rank(n, message("recv", n - 1)) for n in (1, 2, 3)]
    found = judge([*ranks, rank(0, op(4))])
    assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (0,))


@pytest.mark.parametrize("ago_s", [0.2, 60.0])
def test_a_stage_that_has_just_failed_leads_on_to_whom_it_waited_for(ago_s: float) -> None:
    """Later than that it is known to have gone on, and to do something else."""
    failed = {"state": evidence.FAILED, "ended_age_s": ago_s}
    first = rank(0, dataclasses.replace(message("recv", 1), **{**failed, "ended_age_s": 0.0}))
    second = rank(1, dataclasses.replace(message("recv", 2), **failed, sequence=7))
    found = judge([first, second, rank(2, op(4))], failed=("dp", 1, True))
    assert found.kind == verdict.NEVER_ENTERED
    assert found.ranks == ((2,) if ago_s < 1 else (1,)), found.sentence


def test_of_a_rank_that_has_ended_it_is_said_what_it_had_waited_for() -> None:
    found = judge([rank(0, message("recv", 1)), rank(1, op(4), process=evidence.GONE)])
    told = verdict.with_cause(found, {1: "rank 2 never sent"}.get)
    assert told == f"{found.sentence}; its own operation had failed: rank 2 never sent"
    assert verdict.with_cause(found, lambda rank: None) == found.sentence
    alive = judge([rank(0, message("recv", 1)), rank(1, op(4))])
    assert verdict.with_cause(alive, {1: "rank 2 never sent"}.get) == alive.sentence


def test_a_message_from_anybody() -> None:
    found = judge([rank(0, message("recv", -1)), *(rank(n, op(1)) for n in (1, 2, 3))])
    assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (1, 2, 3))


@pytest.mark.parametrize("tags", [[1, 2, 3], [3, 1], [7, 7, 3]])
def test_where_any_of_several_messages_fits_the_program_is_not_to_blame(tags: list[int]) -> None:
    """One waits in another than its peer does, though what the peer wants has been sent."""
    sent = [
        dataclasses.replace(message("send", 1, tag=tag), sequence=number)
        for number, tag in enumerate(tags, 1)
    ]
    found = judge([rank(0, *sent), rank(1, message("recv", 0, tag=3))])
    assert found.kind == verdict.ALL_INSIDE, found.sentence
    assert "sends 32000000 x bfloat16 with tag 3" in found.sentence
    assert "not the program is stuck" in found.sentence


def test_a_posted_receive_that_fits_is_seen_though_its_rank_waits_for_something_else() -> None:
    posted = message("recv", 0, asynchronous=True)
    found = judge([rank(0, message("send", 1)), rank(1, posted, op(4), inside(5))])
    assert "never received" not in found.sentence


def test_a_rank_that_has_only_posted_a_receive_waits_for_nobody() -> None:
    posted = message("recv", 0, age_s=5000.0, asynchronous=True)
    found = judge([*waiting(0, 1, 3), rank(2, posted, op(4))])
    assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (2,))
    assert found.operation == "all_reduce #5 of group dp (64 MB bfloat16)"


def test_a_receive_that_is_not_yet_due_blames_nobody_before_a_collective() -> None:
    posted = message("recv", 3, age_s=5000.0, asynchronous=True)
    ranks = [rank(0, posted, op(4), inside(5)), *waiting(1, 3), rank(2, op(4))]
    assert judge(ranks).ranks == (2,)


def test_operations_on_devices() -> None:
    """The host only knows that they were put on a stream."""

    def issued(sequence: int) -> Operation:
        return op(sequence, state=evidence.ISSUED, on_device=True, ended_age_s=None)

    ahead = [rank(n, *(issued(each) for each in range(1, 9))) for n in (0, 1, 3)]
    found = judge([*ahead, rank(2, *(issued(each) for each in range(1, 6)))])
    assert (found.kind, found.ranks, found.sequence) == (verdict.NEVER_ENTERED, (2,), 6)
    even = [rank(n, issued(1)) for n in WORLD]
    assert judge(even).kind == verdict.NO_HANG
    assert judge(even, gave_up="dp").kind == verdict.NO_HANG  # nor does it tell who is late
    assert judge([*ahead, rank(2, issued(1))], gave_up="dp").sequence == 2


def test_ranks_in_different_operations_on_devices() -> None:
    """A kernel gave up: both sides are in the records."""

    def issued(sequence: int, **changes: Any) -> Operation:
        return op(sequence, state=evidence.ISSUED, on_device=True, ended_age_s=None, **changes)

    ranks = [rank(n, issued(1), issued(2), issued(3)) for n in (0, 1, 3)]
    ranks.append(rank(2, issued(1), issued(2, count=7, bytes=14), issued(3)))
    assert judge(ranks).kind == verdict.NO_HANG
    found = judge(ranks, gave_up="dp")
    assert (found.kind, found.ranks, found.sequence) == (verdict.MISMATCH, (2,), 2)
    assert "rank 2 entered all_reduce (7 x bfloat16, sum)" in found.sentence
    assert "all_reduce (32000000 x bfloat16, sum)" in found.sentence
    assert judge(ranks, gave_up="tp").kind == verdict.NO_HANG


def test_nothing_is_wrong() -> None:
    found = judge([rank(n, op(4)) for n in WORLD])
    assert found.kind == verdict.NO_HANG
    assert "no hang" in found.sentence
    assert judge(waiting(0, 1, 3, age_s=0.2) + [rank(2, op(4))], least_s=1).kind == verdict.NO_HANG
    assert judge([]).kind == verdict.NO_HANG


def test_a_stopped_rank_that_nobody_waits_for_yet() -> None:
    found = judge([rank(0, op(4)), rank(1, op(4), process=evidence.STOPPED)])
    assert found.kind == verdict.NO_HANG
    assert "rank 1 (" in found.sentence


def test_a_call_that_has_just_timed_out_counts_as_waiting() -> None:
    failed = [rank(n, op(4), op(5, state=evidence.FAILED)) for n in (0, 1, 3)]
    ranks = [*failed, rank(2, op(4))]
    assert judge(ranks).kind == verdict.NO_HANG
    found = judge(ranks, failed=("dp", 5, False))
    assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (2,))
    received = [rank(0, op(1, "recv", root=1, state=evidence.FAILED)), rank(1, op(4))]
    assert judge(received, failed=("dp", 1, True)).ranks == (1,)


def test_a_large_job() -> None:
    everyone = tuple(range(512))
    ranks = [
        rank(n, op(4), *([] if n == 300 else [inside(5)]), groups={"dp": everyone})
        for n in everyone
    ]
    found = judge(ranks)
    assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (300,))


def test_evidence_travels() -> None:
    for peer in [*waiting(0, 1), rank(2, message("recv", -1)), Rank(3, process=evidence.MISSING)]:
        assert evidence.from_json(evidence.to_json(peer)) == peer


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "0"},
        {"rank": True},
        {"rank": -1},
        {"process": "asleep"},
        {"groups": {}},
        {"groups": [{"name": "x"}]},
        {"operations": [1]},
        {"frames": [["a", 1]]},
        {"pid": None},
        {"more": 1},
        {"host": "x" * (1 << 19)},
    ],
)
def test_evidence_from_the_network_is_checked(change: dict[str, Any]) -> None:
    import json

    good = json.loads(evidence.to_json(waiting(0)[0]))
    with pytest.raises(ValueError, match="no evidence"):
        evidence.from_json(json.dumps(good | change))
    for text in ("", "[]", "{", b"\xff", "[" * 100_000):
        with pytest.raises(ValueError, match="no evidence"):
            evidence.from_json(text)
