"""No hang and no riddle: every failure is an exception that says who and what, on every rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from deepytorch_core.testing import rank_store, spawn_ranks

BACKEND = "deepytorch"
OFF_SWITCH = "(DEEPYTORCH_ENABLED=0 turns deepytorch off)"

# A killed rank is noticed at once; the limit only tells that from waiting for a timeout.
NOTICED_WITHIN_S = 5.0


def error_of(call: Callable[[], object]) -> str:
    """The text of the DistBackendError that `call` ends with."""
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    text = str(caught.value)
    assert OFF_SWITCH in text
    return text


def works(world_size: int) -> None:
    tensor = torch.ones(5000)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((5000,), float(world_size)))


def differ_in_size(rank: int) -> None:
    dist.all_reduce(torch.ones(10 + rank))


def differ_in_algorithm(rank: int) -> None:
    dist.all_reduce(torch.ones(10 + 100_000 * rank))


def differ_in_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(10, dtype=(torch.float32, torch.bfloat16)[rank % 2]))


def differ_in_native_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(10, dtype=(torch.float32, torch.uint16)[rank % 2]))


def differ_in_op(rank: int) -> None:
    dist.all_reduce(torch.ones(10), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank % 2])


def differ_in_collective(rank: int) -> None:
    if rank % 2:
        dist.broadcast(torch.ones(10), 0)
    else:
        dist.all_reduce(torch.ones(10))


def differ_in_root(rank: int) -> None:
    dist.broadcast(torch.ones(10), rank % 2)


def differ_asynchronously(rank: int) -> None:
    work = dist.all_reduce(torch.ones(10 + rank), async_op=True)
    assert work is not None
    work.wait()


DIFFERENCES = {
    "size": (differ_in_size, "10 x float32", "11 x float32"),
    "algorithm": (differ_in_algorithm, "10 x float32", "100010 x float32"),
    "dtype": (differ_in_dtype, "float32", "bfloat16"),
    "native_dtype": (differ_in_native_dtype, "float32", "another dtype"),
    "op": (differ_in_op, "sum", "max"),
    "collective": (differ_in_collective, "all_reduce", "broadcast"),
    "root": (differ_in_root, "root 0", "root 1"),
    "asynchronous": (differ_asynchronously, "10 x float32", "11 x float32"),
}


def disagree(rank: int, world_size: int, name: str) -> str:
    works(world_size)
    text = error_of(lambda: DIFFERENCES[name][0](rank))
    works(world_size)
    return text


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_mismatch_names_both_sides_on_every_rank(difference: str) -> None:
    texts = spawn_ranks(disagree, 2, difference, backend=BACKEND)
    for text in texts:
        for part in ("rank 0", "rank 1", *DIFFERENCES[difference][1:]):
            assert part in text


def wrong_arguments(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="root"):
        dist.broadcast(torch.ones(3), group_src=world_size, group=group)
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_gather([torch.ones(3)] * (world_size + 1), torch.ones(3))
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_gather_into_tensor(torch.ones(3 * world_size + 1), torch.ones(3))
    with pytest.raises((ValueError, RuntimeError)):
        dist.reduce_scatter_tensor(torch.ones(3), torch.ones(3 * world_size - 1))
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_gather_into_tensor(torch.ones(3 * world_size).double(), torch.ones(3))
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX)
    works(world_size)


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    spawn_ranks(wrong_arguments, 2, backend=BACKEND)


def one_stays_away(rank: int, world_size: int, first: bool) -> list[str]:
    group = dist.new_group()
    other = dist.new_group()
    if not first:
        dist.barrier(group)
    group.set_timeout(timedelta(seconds=1))
    texts = []
    if rank != 1:
        texts.append(error_of(lambda: dist.all_reduce(torch.ones(10), group=group)))
    dist.barrier(other)
    # From now on the group is out of step, also for the one who comes late.
    texts.append(error_of(lambda: dist.all_reduce(torch.ones(10), group=group)))
    texts.append(error_of(lambda: dist.barrier(group)))
    works(world_size)
    return texts


@pytest.mark.parametrize("first", [False, True])
def test_timeout_names_the_missing_rank(first: bool) -> None:
    texts = spawn_ranks(one_stays_away, 3, first, backend=BACKEND, timeout_s=30)
    for rank in (0, 2):
        assert "all_reduce" in texts[rank][0]
        # The first to notice names it; who is told by that one may get its words.
        assert "1" in texts[rank][0]
        assert f"rank {rank}" in texts[rank][0]
    assert "barrier" in texts[0][2]


def wait_with_a_timeout(rank: int, world_size: int) -> None:
    works(world_size)
    if rank == 0:
        work = dist.all_reduce(torch.ones(100), async_op=True)
        assert work is not None
        text = error_of(lambda: work.wait(timedelta(milliseconds=200)))
        assert "200 ms" in text
        rank_store("go").set("on", "")
        work.wait()
    else:
        rank_store("go").get("on")
        dist.all_reduce(torch.ones(100))
    works(world_size)


def test_wait_may_give_up_sooner_than_the_operation() -> None:
    spawn_ranks(wait_with_a_timeout, 2, backend=BACKEND)


def timeout_set_later(rank: int, world_size: int) -> None:
    works(world_size)
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(timedelta(seconds=1))
    if rank == 0:
        text = error_of(lambda: dist.all_reduce(torch.ones(100)))
        assert "1000 ms" in text
    rank_store("both").set(str(rank), "")
    rank_store("both").wait([str(peer) for peer in range(world_size)])


def test_timeout_can_be_changed() -> None:
    spawn_ranks(timeout_set_later, 2, backend=BACKEND, timeout_s=30)


def die(rank: int, how: str) -> None:
    if how == "with data workers":
        data = TensorDataset(torch.arange(64.0))
        loader = iter(DataLoader(data, num_workers=2, persistent_workers=True))
        next(loader)  # forked children hold whatever this process has not closed in them
    rank_store("time").set("of death", str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def _for_ever(call: Callable[..., object], *args: object) -> None:
    while True:
        call(*args)


def operation(how: str) -> None:
    if how == "asynchronous":
        work = dist.all_reduce(torch.ones(500_000), async_op=True)
        assert work is not None
        work.wait()
    elif how == "barrier":
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(500_000))


def one_is_killed(rank: int, world_size: int, how: str) -> tuple[str, float]:
    works(world_size)
    if how == "with data workers" and rank != 2:
        # The survivors' children must not keep anything open either.
        loader = iter(DataLoader(TensorDataset(torch.arange(64.0)), num_workers=1))
        next(loader)
    if rank == 2:
        die(rank, how)
    text = error_of(lambda: _for_ever(operation, how))
    noticed = time.time() - float(rank_store("time").get("of death"))
    later = error_of(lambda: dist.all_reduce(torch.ones(3)))
    assert "2" in later
    return text, noticed


@pytest.mark.parametrize("how", ["at once", "asynchronous", "barrier", "with data workers"])
def test_killed_rank_is_named_by_every_survivor(
    how: str, record_property: Callable[[str, object], None]
) -> None:
    results = spawn_ranks(one_is_killed, 4, how, backend=BACKEND, expect_dead={2}, timeout_s=60)
    survivors = [result for result in results if result is not None]
    assert len(survivors) == 3
    for text, noticed in survivors:
        assert "rank 2" in text
        assert noticed < NOTICED_WITHIN_S
    record_property("noticed_s", [round(noticed, 3) for _, noticed in survivors])


def killed_before_the_first(rank: int, world_size: int) -> tuple[str, float]:
    if rank == 2:
        die(rank, "at once")
    text = error_of(lambda: dist.all_reduce(torch.ones(3)))
    return text, time.time() - float(rank_store("time").get("of death"))


def test_rank_killed_before_the_first_operation() -> None:
    results = spawn_ranks(
        killed_before_the_first, 3, backend=BACKEND, expect_dead={2}, timeout_s=40
    )
    for text, noticed in results[:2]:
        assert "rank 2" in text or "rank(s) 2" in text
        assert noticed < NOTICED_WITHIN_S


def killed_while_delegated(rank: int, world_size: int) -> bool:
    works(world_size)
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (world_size,))
    dist.all_reduce(sparse.clone())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def exchange() -> None:
        dist.all_reduce(sparse.clone())

    with pytest.raises(RuntimeError):
        _for_ever(exchange)
    return True


def test_killed_rank_ends_delegated_operations_too() -> None:
    results = spawn_ranks(killed_while_delegated, 3, backend=BACKEND, expect_dead={1}, timeout_s=40)
    assert results == [True, None, True]


def _all_reduce_and_wait(group: dist.ProcessGroup, *, asynchronous: bool) -> None:
    work = dist.all_reduce(torch.ones(10), group=group, async_op=asynchronous)
    if work is not None:
        work.wait()


def interrupted(rank: int, world_size: int, how: str) -> str:
    works(world_size)
    group = dist.new_group()
    dist.barrier(group)
    if rank == 0:
        main = threading.main_thread().ident
        assert main is not None
        finger = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        finger.start()
        with pytest.raises(KeyboardInterrupt):
            _all_reduce_and_wait(group, asynchronous=how == "asynchronous")
        rank_store("pressed").set("it", "")
        return ""
    rank_store("pressed").get("it")
    if how == "asynchronous":
        dist.all_reduce(torch.ones(10), group=group)  # the operation itself went on
        return ""
    return error_of(lambda: dist.all_reduce(torch.ones(10), group=group))


@pytest.mark.parametrize("how", ["waiting", "asynchronous"])
def test_ctrl_c_ends_a_wait(how: str) -> None:
    _, text = spawn_ranks(interrupted, 2, how, backend=BACKEND, timeout_s=30)
    assert how == "asynchronous" or "interrupted" in text


def interrupted_alone(rank: int, world_size: int) -> None:
    if rank == 0:
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(10))
    rank_store("both").set(str(rank), "")
    rank_store("both").wait([str(peer) for peer in range(world_size)])


def test_ctrl_c_ends_the_wait_for_ranks_that_do_not_join() -> None:
    spawn_ranks(interrupted_alone, 2, backend=BACKEND, timeout_s=30)


def aborted(rank: int, world_size: int) -> str:
    works(world_size)
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:
        group.abort()
    return error_of(lambda: dist.all_reduce(torch.ones(10)))


def test_abort_reaches_every_rank() -> None:
    for text in spawn_ranks(aborted, 2, backend=BACKEND, timeout_s=30):
        assert "abort" in text


def again_after_failure(rank: int, world_size: int) -> None:
    from deepytorch_core.c10d import backend

    backend.register()
    for attempt in ("first", "second"):
        store = rank_store(attempt)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
        works(world_size)
        if rank == 0:
            dist.group.WORLD.abort()  # type: ignore[union-attr]
        error_of(dist.barrier)
        dist.destroy_process_group()


def test_a_failed_group_can_be_made_again() -> None:
    spawn_ranks(again_after_failure, 2, timeout_s=30)


def one_leaves(rank: int, world_size: int) -> str:
    works(world_size)
    if rank == 1:
        dist.destroy_process_group()
        return ""
    return error_of(lambda: dist.all_reduce(torch.ones(10)))


def test_a_rank_that_left_is_named() -> None:
    texts = spawn_ranks(one_leaves, 3, backend=BACKEND, timeout_s=30)
    assert "rank 1" in texts[0]
    assert "rank 1" in texts[2]


PROGRAM = """
import sys, torch, torch.distributed as dist
from deepytorch_core.c10d import backend
backend.register()
rank, path, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("deepytorch", init_method=f"file://{path}", rank=rank, world_size=2)
group = dist.new_group()
tensor = torch.ones(50_000)
works = [dist.all_reduce(tensor, group=each, async_op=True) for each in (None, group)]
if ending == "waited":
    for work in works:
        work.wait()
if ending != "waited":
    # Nobody but the operations themselves hold these.
    for _ in range(40):
        dist.all_reduce(torch.ones(500_000), async_op=True)
if ending == "raised on rank 1" and rank == 1:
    raise ValueError("of the program itself")
print("last line", flush=True)
"""


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("waited", marks=pytest.mark.extended),
        pytest.param("not waited", marks=pytest.mark.extended),
        "raised on rank 1",
    ],
)
def test_interpreter_ends_with_groups_open(tmp_path: Path, ending: str) -> None:
    """No hang, no crash, no noise when a program doesn't say goodbye.

    The operations are native ones only. A gloo group that is still open at the end can abort the
    process, in stock PyTorch too: one of its threads may ask for Python's lock too late.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    for rank, (process, (stdout, stderr)) in enumerate(zip(processes, outputs, strict=True)):
        # Torch marks a traceback's lines with the rank.
        lines = [re.sub(r"^\[rank\d\]: ?", "", line) for line in stderr.splitlines()]
        if rank == 1 and ending == "raised on rank 1":
            assert process.returncode == 1
            assert lines[0].startswith("Traceback")
            assert lines[-1] == "ValueError: of the program itself"
        else:
            assert (process.returncode, stdout, lines) == (0, "last line\n", [])
