"""Threads of ours, which a program does not find among its own."""

from __future__ import annotations

import os
import threading

import pytest

from deepytorch_core.base import unlisted


def test_a_thread_runs_unlisted_under_its_name_until_it_ends() -> None:
    before, go_on, seen = threading.enumerate(), threading.Event(), []

    def target(*args: int) -> None:
        seen.extend(args)
        go_on.wait()

    thread = unlisted.Thread(target, (1, 2), name="one of ours")
    assert not thread.is_alive()
    thread.start()
    assert thread.is_alive()
    assert thread.native_id not in (0, threading.get_native_id())
    assert "one of ours" in unlisted.names().values()
    assert threading.enumerate() == before
    thread.join(0.01)
    assert thread.is_alive()
    go_on.set()
    thread.join()
    assert seen == [1, 2]
    assert not thread.is_alive()
    assert "one of ours" not in unlisted.names().values()


@pytest.mark.filterwarnings("ignore")
def test_one_that_raises_has_ended() -> None:
    thread = unlisted.Thread(lambda: 1 / 0, name="raises")
    thread.start()
    thread.join()
    assert not thread.is_alive()


def test_a_forked_child_waits_for_none_of_its_parents() -> None:
    go_on = threading.Event()
    thread = unlisted.Thread(go_on.wait, name="of the parent")
    thread.start()
    child = os.fork()
    if child == 0:
        thread.join()
        os._exit(0 if not thread.is_alive() and not unlisted.names() else 1)
    _, status = os.waitpid(child, 0)
    go_on.set()
    thread.join()
    assert status == 0
