"""A program's own signal handlers, which may do anything while their rank is in a collective."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import rank_store, spawn_ranks

BACKEND = "deepytorch"


@contextmanager
def handled(handler: Callable[[], object]) -> Iterator[None]:
    """While open this rank gets a signal soon, and `handler` runs."""
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR2, lambda number, frame: handler())
    finger = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGUSR2))
    finger.start()
    try:
        yield
    finally:
        finger.join()
        signal.signal(signal.SIGUSR2, before)


def meets_in_a_handler(rank: int, world_size: int) -> list[float]:
    """Rank 1's handler sums while the rank waits for another sum."""
    dist.barrier()
    told = rank_store("handler")
    sums: list[float] = []

    def add(number: float) -> None:
        value = torch.full((1000,), number + rank)
        dist.all_reduce(value)
        sums.append(value[0].item())

    def in_handler() -> None:
        told.set("entered", "")
        add(10.0)

    if rank == 1:
        with handled(in_handler):
            add(1.0)
    else:
        told.get("entered")
        add(1.0)
        add(10.0)
    return sorted(sums)


def test_a_handler_may_start_operations_of_the_group_that_is_waited_for() -> None:
    assert spawn_ranks(meets_in_a_handler, 2, backend=BACKEND, timeout_s=30) == [[3, 21], [3, 21]]


def leaves_in_a_handler(rank: int, world_size: int) -> None:
    """Rank 1's handler destroys the group that the rank waits in, and exits."""
    dist.barrier()
    told = rank_store("handler")

    def in_handler() -> None:
        dist.destroy_process_group()
        told.set("left", "")
        raise SystemExit(0)

    if rank == 1:
        with pytest.raises(SystemExit), handled(in_handler):
            dist.all_reduce(torch.ones(1000))
        assert not dist.is_initialized()
    else:
        told.get("left")
        with pytest.raises(dist.DistBackendError, match="destroyed on rank 1|rank 1 has left"):
            dist.all_reduce(torch.ones(1000))


def test_a_handler_may_leave_the_group_that_is_waited_for() -> None:
    spawn_ranks(leaves_in_a_handler, 2, backend=BACKEND, timeout_s=30)
    spawn_ranks(meets_in_a_handler, 2, backend=BACKEND, timeout_s=30)  # the processes are well
