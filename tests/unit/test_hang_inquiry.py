"""Questions about other nodes that a process takes from outside, by one that asks itself."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from deepytorch_core.hang import evidence, inquiry
from deepytorch_core.hang.evidence import Rank

SELF = os.getpid()


def some_ranks(count: int) -> list[Rank]:
    numbers = random.Random(count)
    return [
        Rank(rank, "b", numbers.randrange(1, 1 << 22), stacks="ö\n" * numbers.randrange(9999))
        for rank in range(count)
    ]


@contextmanager
def clerk(
    desk: inquiry.Desk, serve: Callable[[inquiry.EvidenceRequest], None]
) -> Iterator[list[inquiry.EvidenceRequest]]:
    """A thread that takes questions as live.py's does."""
    over = threading.Event()
    taken: list[inquiry.EvidenceRequest] = []

    def work() -> None:
        while not over.is_set():
            for question in desk.wait(60):
                taken.append(question)
                serve(question)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        desk.wake()
        thread.join(10)
        assert not thread.is_alive(), "a call to wake up is heard at once"


@pytest.fixture
def desk() -> Iterator[inquiry.Desk]:
    made = inquiry.Desk()
    yield made
    made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_answered_comes_back_whole(desk: inquiry.Desk) -> None:
    before = descriptors()
    for count in (0, 1, 77):
        with clerk(desk, lambda question: desk.reply(question, some_ranks(count))) as taken:  # noqa: B023
            answer = inquiry.ask([SELF], how=inquiry.AGAIN if count == 77 else inquiry.GENTLY)
        assert answer == inquiry.EvidenceReply(tuple(some_ranks(count)))
        expected = inquiry.AGAIN if count == 77 else inquiry.GENTLY
        assert [question.how for question in taken] == [expected]
    assert descriptors() == before


def test_why_nobody_can_be_asked(desk: inquiry.Desk) -> None:
    assert "took the question within 0.2 s" in inquiry.ask([SELF], limit_s=0.2).problem
    with clerk(desk, lambda question: None):
        assert "store did not answer" in inquiry.ask([SELF], limit_s=0.5).problem
    with clerk(desk, lambda question: desk.reply(question, [], problem="the store is gone")):
        assert inquiry.ask([SELF]) == inquiry.EvidenceReply(problem="the store is gone")
    with clerk(desk, lambda question: desk.close()):
        assert "no process of this node listens" in inquiry.ask([SELF]).problem
    assert "no process of this node listens" in inquiry.ask([SELF, 1 << 30]).problem


def test_a_last_word_is_heard() -> None:
    for _ in range(20):
        desk = inquiry.Desk()

        def end(question: inquiry.EvidenceRequest) -> None:
            desk.reply(question, [], problem="the store is gone")  # noqa: B023
            desk.close()  # noqa: B023

        with clerk(desk, end):
            assert inquiry.ask([SELF]).problem == "the store is gone"


def test_what_is_no_question_is_none(desk: inquiry.Desk) -> None:
    late = time.monotonic() - 1
    soon = time.monotonic() + 100
    for line in (f"abc first {late}", f"../x first {soon}", "abc first", "abc first soon", "\xff"):
        os.write(desk._descriptors[1], line.encode("latin-1") + b"\n")
    assert desk.wait(0) == []
    lines = f"\nabc again {soon}\nabd first {soon}\nabe roughly {soon}\n"
    os.write(desk._descriptors[1], lines.encode())
    assert [(question.token, question.how) for question in desk.wait(0)] == [
        ("abc", "again"),
        ("abd", "first"),
    ]


def test_answers_of_others_and_lies_are_left_out(desk: inquiry.Desk) -> None:
    def lie(question: inquiry.EvidenceRequest) -> None:
        desk.reply(inquiry.EvidenceRequest("fff", inquiry.FIRST, until=0.0), some_ranks(2))
        for ranks in ([1, {}, "x", evidence.to_json(Rank(5))], []):
            desk._write({"token": question.token, "ranks": ranks})

    with clerk(desk, lie):
        assert inquiry.ask([SELF]).ranks == (Rank(5),)


def test_two_that_ask_at_once_both_get_theirs(desk: inquiry.Desk) -> None:
    found: list[Sequence[Rank]] = []

    def slowly(question: inquiry.EvidenceRequest) -> None:
        time.sleep(0.1)
        desk.reply(question, some_ranks(5))

    with clerk(desk, slowly):
        asking = [
            threading.Thread(target=lambda: found.append(inquiry.ask([SELF]).ranks))
            for _ in range(3)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    assert found == [tuple(some_ranks(5))] * 3


def test_a_forked_child_takes_no_questions(desk: inquiry.Desk) -> None:
    inquiry._forget()  # what runs in the child
    assert desk.wait(60) == []
    assert "no process of this node listens" in inquiry.ask([SELF]).problem
