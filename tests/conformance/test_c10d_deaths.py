"""Ranks killed, stopped, or watched without pidfds: who is told what, and who goes on."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from deepytorch_core.testing import rank_store, spawn_ranks

BACKEND = "deepytorch"

# A killed rank is noticed at once; the limit only tells that from waiting for a timeout.
NOTICED_WITHIN_S = 5.0


def works(world_size: int) -> None:
    tensor = torch.ones(5000)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((5000,), float(world_size)))


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value)


def loaded() -> object:
    """A data loader with live forked workers, which hold what this process left open in them."""
    data = TensorDataset(torch.arange(64.0))
    loader = iter(DataLoader(data, num_workers=2, persistent_workers=True))
    next(loader)
    return loader


def all_reduce() -> None:
    tensor = torch.ones(4 << 20)
    while True:
        dist.all_reduce(tensor)


def all_to_all() -> None:
    source, target = torch.ones(3, 1 << 20), torch.empty(3, 1 << 20)
    while True:
        dist.all_to_all_single(target, source)


LOOPS = {loop.__name__: loop for loop in (all_reduce, all_to_all)}


def killed_in_mid_operation(rank: int, world_size: int, loop: str) -> tuple[str, float]:
    works(world_size)
    loader = loaded()
    store = rank_store("time")

    def die() -> None:
        store.set("of death", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        # The loop never ends by itself, and hardly ever is between two operations.
        threading.Timer(0.2, die).start()
    with pytest.raises(RuntimeError) as caught:
        LOOPS[loop]()
    noticed = time.time() - float(store.get("of death"))
    assert "died" in error_of(lambda: dist.all_reduce(torch.ones(3)))
    del loader
    return str(caught.value), noticed


@pytest.mark.parametrize("loop", LOOPS)
def test_killed_in_mid_operation(loop: str, record_property: Callable[[str, object], None]) -> None:
    results = spawn_ranks(killed_in_mid_operation, 3, loop, backend=BACKEND, expect_dead={1})
    for text, noticed in (results[0], results[2]):
        assert "rank 1" in text
        assert noticed < NOTICED_WITHIN_S
    record_property("noticed_s", [round(results[rank][1], 3) for rank in (0, 2)])


def stopped(rank: int, world_size: int) -> str:
    works(world_size)
    group = dist.new_group()
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=2))
    store = rank_store("stopped")
    if rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        text = error_of(lambda: dist.all_reduce(torch.ones(10), group=group))
    else:
        pid = int(store.get("pid"))
        text = error_of(lambda: dist.all_reduce(torch.ones(10), group=group))
        if rank == 0:
            os.kill(pid, signal.SIGCONT)
    works(world_size)  # it was not taken for dead
    return text


def test_a_timeout_tells_a_stopped_rank_from_a_busy_one() -> None:
    for text in spawn_ranks(stopped, 3, backend=BACKEND, timeout_s=40):
        assert "1 (for " in text
        assert "no sign of life" in text
        assert "stopped or frozen?" in text


def busy(rank: int, world_size: int) -> str:
    group = dist.new_group()
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=2))
    text = ""
    if rank == 0:
        text = error_of(lambda: dist.all_reduce(torch.ones(10), group=group))
        rank_store("over").set("now", "")
    while rank != 0 and not rank_store("over").check(["now"]):
        sum(range(100_000))  # holds Python's lock
    return text


def test_a_timeout_says_that_a_busy_rank_is_alive() -> None:
    text = spawn_ranks(busy, 2, backend=BACKEND, timeout_s=40)[0]
    assert "rank(s) 1 did not come, though alive" in text


PIDFD_OPEN = 434  # the same number on every architecture


def forbid(system_call: int, error: int) -> None:
    """Let `system_call` fail with `error` in this thread from now on, as a container may."""
    load, jump_if_equal, end = 0x20, 0x15, 0x06
    failing, allowed = 0x00050000, 0x7FFF0000
    steps = [
        (load, 0, 0, 0),
        (jump_if_equal, 0, 1, system_call),
        (end, 0, 0, failing | error),
        (end, 0, 0, allowed),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("H6xP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, ctypes.create_string_buffer(program)) == 0
    with pytest.raises(OSError, match=rf"\[Errno {error}\]"):
        os.pidfd_open(os.getpid())


def without_pidfds(rank: int, world_size: int, where: list[int], error: int) -> tuple[str, float]:
    if rank in where:
        forbid(PIDFD_OPEN, error)
    works(world_size)
    store = rank_store("orders")
    if rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 0:
        pid = int(store.get("pid"))
        time.sleep(1.0)  # several looks of the watchdogs at a stopped process
        os.kill(pid, signal.SIGCONT)
    works(world_size)
    if rank == 1:
        store.set("death", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    text = error_of(lambda: works(world_size))
    return text, time.time() - float(store.get("death"))


@pytest.mark.parametrize(("where", "error"), [([0, 1, 2], 1), ([1], 38)])
def test_deaths_are_noticed_without_pidfds(
    where: list[int], error: int, record_property: Callable[[str, object], None]
) -> None:
    results = spawn_ranks(
        without_pidfds, 3, where, error, backend=BACKEND, expect_dead={1}, fresh=True
    )
    for text, noticed in (results[0], results[2]):
        assert "rank 1" in text
        assert "died" in text
        assert noticed < NOTICED_WITHIN_S
    record_property("noticed_s", [round(results[rank][1], 3) for rank in (0, 2)])


def refused(rank: int, world_size: int) -> int:
    """How often the dead are looked for where gloo refuses an operation's arguments."""
    from deepytorch_core.c10d.delegates import StockFactory

    works(world_size)
    looked: list[int] = []
    look = StockFactory.who_died
    StockFactory.who_died = lambda self: looked.append(1) or ""  # type: ignore[method-assign,func-returns-value]
    try:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)
    finally:
        StockFactory.who_died = look  # type: ignore[method-assign]
    works(world_size)
    return len(looked)


def test_nobody_is_taken_for_dead_where_arguments_are_refused() -> None:
    assert spawn_ranks(refused, 2, backend=BACKEND) == [0, 0]


def joins(rank: int, world_size: int, port: int, victims: set[int], late: int = -1) -> float:
    from deepytorch_core.c10d import backend

    backend.register()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if rank == late:
        time.sleep(2)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    works(world_size)
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    value = torch.ones(3)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value[0].item()


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_ranks_started_again_over_the_same_store_do_not_believe_what_killed_ones_left(
    late: int,
) -> None:
    """torchrun keeps one store for all attempts; one of the new ranks may come last."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    everyone = {0, 1}
    spawn_ranks(joins, 2, server.port, everyone, expect_dead=everyone, fresh=True)
    assert spawn_ranks(joins, 2, server.port, set(), late, fresh=True) == [2.0, 2.0]
