"""One rank keeps the GIL for ever, in native code: the verdict says in which line all the same.

Rank 0 looks on; ranks 1 and 2 have a group, and rank 2 never comes to its second operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.distributed as dist

from deepytorch_core.c10d import backend
from deepytorch_core.hang import collect, live, verdict
from deepytorch_core.testing import rank_store, spawn_ranks

CULPRIT = 2
SETTLE_S = 0.5
LOOK_S = 8.0  # on a busy machine it takes a while to see that nobody hands the GIL on


def libc() -> ctypes.PyDLL:
    """The C library, called with the GIL kept."""
    return ctypes.PyDLL(None)


def sleeps() -> None:
    libc().sleep(100_000)


def reads() -> None:
    libc().read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def computes() -> None:
    sum(iter(int, 1))


def matches() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def multiplies() -> None:
    10**10**9


def multiplies_objects() -> None:
    many = numpy.ones((3000, 3000), dtype=object)
    many.dot(many)


def waits_for_a_thread() -> None:
    holder = threading.Thread(target=sleeps)
    holder.start()
    holder.join()


def ignores_signals() -> None:
    for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
        signal.signal(number, signal.SIG_IGN)
    libc().sleep(100_000)


# The verdict on each kind: the line, or what the system knows where nothing else is left.
KINDS: dict[str, tuple[Callable[[], None], str]] = {
    "sleeps in C": (sleeps, "libc().sleep(100_000)"),
    "reads in C": (reads, "libc().read(os.pipe()[0]"),
    "computes in C": (computes, "sum(iter(int, 1))"),
    "regular expression": (matches, 're.match(r"(a+)+$"'),
    "large number": (multiplies, "10**10**9"),
    "objects in numpy": (multiplies_objects, "many.dot(many)"),
    "another thread": (waits_for_a_thread, "holder."),
    "signals blocked": (sleeps, "libc().sleep(100_000)"),
    "handlers taken away": (ignores_signals, "its main thread waits in the kernel"),
}
# The others show the same by other means.
NEEDED = ("sleeps in C", "regular expression", "signals blocked", "handlers taken away")


def keep_the_gil(rank: int, world_size: int, kind: str) -> str:
    """Return what rank 0 comes to see of a job whose rank 2 hangs in the way of `kind`."""
    if kind == "signals blocked":  # in all threads, as they inherit it
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.SIGRTMAX + 1))
    backend.register()
    dist.init_process_group("deepytorch", store=rank_store("job"), rank=rank, world_size=world_size)
    group = dist.new_group([1, CULPRIT])
    store = rank_store("pids")
    store.set(str(rank), str(os.getpid()))
    if rank == 0:
        culprit = int(store.get(str(CULPRIT)))
        store.get("met")
        time.sleep(SETTLE_S)
        assert live._home is not None
        ranks = collect.ranks(live._records(live._home), stacks_limit_s=LOOK_S)
        os.kill(culprit, signal.SIGKILL)
        found = verdict.judge(ranks)
        assert (found.kind, found.ranks) == (verdict.NEVER_ENTERED, (CULPRIT,)), found.sentence
        return found.sentence
    dist.all_reduce(torch.ones(10), group=group)
    if rank == CULPRIT:
        store.set("met", "")
        KINDS[kind][0]()
    with contextlib.suppress(RuntimeError):  # the other has been killed
        dist.all_reduce(torch.ones(10), group=group)
    return ""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in NEEDED else pytest.mark.extended) for kind in KINDS],
)
def test_who_keeps_the_gil_is_named_with_its_line(kind: str) -> None:
    sentence, *_ = spawn_ranks(
        keep_the_gil, 3, kind, backend=None, expect_dead={CULPRIT}, fresh=True, timeout_s=60
    )
    assert KINDS[kind][1] in sentence
    if kind == "handlers taken away":
        assert "gave no Python stack" in sentence
        assert "its last known call is all_reduce #1 at test_hang_gil.py:" in sentence
    else:
        assert "it is in test_hang_gil.py:" in sentence
