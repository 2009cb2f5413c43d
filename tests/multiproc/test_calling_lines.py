"""The line that called an operation, in the flight record: a sample, for which nobody waits."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.hang import evidence, record
from deepytorch_core.testing import spawn_ranks

HERE = os.path.basename(__file__)


def step(value: torch.Tensor, **options: Any) -> Any:
    return dist.all_reduce(value, **options)


def step_elsewhere(value: torch.Tensor) -> None:
    dist.all_reduce(value)


def line_in(function: Any) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + 1} {function.__name__}"


def shown(place: evidence.Place | None) -> str:
    return (
        f"{os.path.basename(place.file)}:{place.line} {place.function}" if place else "not sampled"
    )


def seen_in(pid: int, count: int, op: str = "all_reduce") -> list[evidence.Operation]:
    """The operations of that many elements in a process's record, oldest first."""
    return [each for each in record.read(pid).operations if (each.op, each.count) == (op, count)]


def look_at_the_other(rank: int, world_size: int) -> list[str]:
    """Return what the other rank's record says of its calls, by whichever road they went."""
    step(torch.ones(37))
    step(torch.ones(1700), async_op=True).wait()
    step(torch.ones(130, dtype=torch.float16))
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    gathered = next(
        each for each in record.read(pids[1 - rank]).operations if each.op == "all_gather"
    )
    found = [seen_in(pids[1 - rank], count) for count in (37, 1700, 130)]
    dist.barrier()
    return [shown(each.at) for (each,) in found] + [shown(gathered.at)]


@pytest.mark.parametrize("collectives", ["native", "stock"])
def test_the_record_names_the_users_line(collectives: str) -> None:
    environment = {"DEEPYTORCH_COLLECTIVES": collectives, "DEEPYTORCH_TUNE": "off"}
    for found in spawn_ranks(look_at_the_other, 2, backend="deepytorch", env=environment):
        assert found[:3] == [line_in(step)] * 3
        assert found[3].startswith(HERE)  # not torch's line, which is further inside
        assert found[3].endswith(" look_at_the_other")


def call_often(rank: int, world_size: int) -> tuple[float, int, str]:
    value = torch.zeros(50)
    began = time.monotonic()
    for _ in range(1500):
        step(value)
    took = time.monotonic() - began
    sampled = [each for each in seen_in(os.getpid(), 50) if each.at]
    last = ""
    # Ranks stop together: all call as often.
    for _ in range(100):
        time.sleep(0.05)
        step_elsewhere(value)
        at = seen_in(os.getpid(), 50)[-1].at
        last = shown(at) if at else last
    return took, len(sampled), last


@pytest.mark.extended
def test_it_is_a_sample_of_a_few_a_second() -> None:
    for took, sampled, last in spawn_ranks(call_often, 2, backend="deepytorch"):
        assert 1 <= sampled <= 2 + took / 0.1
        assert last == line_in(step_elsewhere)


@functools.cache
def scripted() -> Any:
    """Starts a thread that has never run Python: an operation, after some computing."""

    def operations(name: str, value: torch.Tensor) -> torch.Tensor:
        product = torch.ones(256, 256)
        for _ in range(100):
            product = torch.mm(product, product) * 0.0
        summed = torch.ops._c10d_functional.all_reduce(value, "sum", name)
        return torch.ops._c10d_functional.wait_tensor(summed) + product[0, 0]

    called = torch.jit.script(operations)

    def start(name: str, value: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
        return torch.jit.fork(called, name, value)

    return torch.jit.script(start)


def call_from_a_thread_without_python(rank: int, world_size: int) -> dict[str, Any]:
    step(torch.ones(60))  # all have met, and this kind of operation is known
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    start = scripted()
    dist.barrier()
    began = time.monotonic()
    future = start(name, torch.ones(61))
    ctypes.PyDLL(None).usleep(3_000_000)  # with the GIL
    let_go = time.monotonic()
    while not future.done():
        time.sleep(0.01)
    result = torch.jit.wait(future)
    (found,) = seen_in(os.getpid(), 61)
    now = time.monotonic()
    return {
        "result": result.tolist(),
        "place": shown(found.at),
        "entered": now - found.age_s - began,
        "held": let_go - began,
    }


def test_a_thread_without_python_enters_without_the_gil_and_is_not_sampled() -> None:
    environment = {
        **{"DEEPYTORCH_COLLECTIVES": "native", "DEEPYTORCH_TUNE": "off"},
        "OWN_STARTER": "1",  # FSDP and the compiler, once imported, make torch enter with the GIL
    }
    for found in spawn_ranks(
        call_from_a_thread_without_python, 2, backend="deepytorch", env=environment
    ):
        assert found["result"] == [2.0] * 61
        assert found["place"] == "not sampled"
        # A thread that waited for it would enter when it is let go.
        assert 0 < found["entered"] < found["held"] - 1, found


def call_while_the_gil_is_held(rank: int, world_size: int) -> list[tuple[bool, str]]:
    ends = threading.Event()

    def hold() -> None:
        library = ctypes.PyDLL(None)
        while not ends.is_set():
            library.usleep(30_000)

    dist.barrier()
    holder = threading.Thread(target=hold)
    holder.start()
    found = []
    try:
        for power in range(3, 9):
            for asynchronous in (True, False):
                value = torch.full((2**power + int(asynchronous),), 1.0)
                work = step(value, async_op=asynchronous)
                if work is not None:
                    work.wait()
                found.append((bool((value == 2).all()), value.numel()))
    finally:
        ends.set()
        holder.join()
    return [(right, shown(seen_in(os.getpid(), count)[0].at)) for right, count in found]


def test_operations_go_on_while_another_thread_holds_the_gil() -> None:
    for found in spawn_ranks(call_while_the_gil_is_held, 2, backend="deepytorch", timeout_s=60):
        assert [right for right, _ in found] == [True] * 12
        assert {place for _, place in found[::2]} == {line_in(step)}  # each the first of its size
