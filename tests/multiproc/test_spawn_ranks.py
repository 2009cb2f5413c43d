"""spawn_ranks itself: results, warm reuse, and every way a rank can go wrong."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import (
    RankError,
    RankTimeoutError,
    assert_same_on_all_ranks,
    rank_store,
    spawn_ranks,
)
from deepytorch_core.testing.worker import UncaughtError


@dataclass
class Answer:
    rank: int
    total: float


def all_reduce_own_rank(rank: int, world_size: int, scale: float, offset: float = 0.0) -> Answer:
    value = torch.full((3,), rank * scale)
    dist.all_reduce(value)
    return Answer(rank, value[0].item() + offset)


def process_id(rank: int, world_size: int) -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def starter_id(rank: int, world_size: int) -> int:
    return os.getppid()


def read_variable(rank: int, world_size: int, name: str) -> str | None:
    return os.environ.get(name)  # noqa: TID251


def address_of_new_mapping(rank: int, world_size: int) -> int:
    # Larger than any gap between what is mapped already.
    mapping = mmap.mmap(-1, 1 << 28, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def raise_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("no such tensor")
    dist.barrier()


def initialise_by_environment(rank: int, world_size: int) -> int:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def whether_rank_1_left_before(rank: int, world_size: int) -> bool:
    if rank == 0:
        time.sleep(0.3)
        return rank_store("left").check(["rank 1"])
    destroy = dist.destroy_process_group

    def leave() -> None:
        rank_store("left").set("rank 1", "")
        destroy()

    dist.destroy_process_group = leave
    return False


class Unpicklable(Exception):
    def __init__(self, *, needed: object) -> None:
        super().__init__("cannot travel")
        self.needed = lambda: needed


def raise_everywhere(rank: int, world_size: int) -> None:
    time.sleep(0.05 * rank)
    raise Unpicklable(needed=rank)


def kill_rank_one(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"rank {rank} survived"


def kill_rank_one_with_child(rank: int, world_size: int) -> int:
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    child.kill()
    child.wait()
    return child.pid


def wait_for_ever_on_rank_zero(rank: int, world_size: int) -> None:
    if rank == 0:
        rank_store("nobody").get("comes")


def raise_uncaught(rank: int, world_size: int, said: str, ended: str) -> int:
    if rank == 0:
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY, 0o600), 2)
        text = "the interpreter ran what is for its end"
        atexit.register(lambda: Path(ended).write_text(text))
        raise UncaughtError("nobody's")
    return rank


def exit_quietly(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(3)


def initialise_twice(rank: int, world_size: int) -> list[int]:
    sizes = []
    for name in ("first", "second"):
        dist.init_process_group("gloo", store=rank_store(name), rank=rank, world_size=world_size)
        sizes.append(dist.get_world_size())
        dist.barrier()  # gloo fails where a peer leaves while a rank still connects
        dist.destroy_process_group()
    return sizes


def compare_values(rank: int, world_size: int, values: list[Any]) -> None:
    assert_same_on_all_ranks(values[rank], "value")


def test_results_come_back_by_rank() -> None:
    answers = spawn_ranks(all_reduce_own_rank, 2, 10.0, offset=1.0, backend="gloo")
    assert answers == [Answer(0, 11.0), Answer(1, 11.0)]


def test_workers_stay_warm_and_single_threaded() -> None:
    first = spawn_ranks(process_id, 2)
    assert spawn_ranks(process_id, 2) == first
    assert len({pid for pid, _ in first} | {os.getpid()}) == 3
    assert [threads for _, threads in first] == [1, 1]
    others = spawn_ranks(process_id, 2, fresh=True)
    assert not {pid for pid, _ in others} & {pid for pid, _ in first}
    assert spawn_ranks(process_id, 2) == first


@pytest.mark.parametrize("name", ["DEEPYTORCH_LOG", "ANYBODYS"])
def test_environment_of_workers(name: str) -> None:
    assert spawn_ranks(read_variable, 2, "LOCAL_RANK") == ["0", "1"]
    assert spawn_ranks(read_variable, 1, name, env={name: "debug"}) == ["debug"]
    assert spawn_ranks(read_variable, 1, name) == [None]


def test_what_torch_may_read_is_there_when_it_is_imported() -> None:
    usual = set(spawn_ranks(starter_id, 2))
    assert set(spawn_ranks(starter_id, 2, env={"DEEPYTORCH_LOG": "debug"})) == usual
    assert usual.isdisjoint(spawn_ranks(starter_id, 1, env={"ANYBODYS": "debug"}))


def test_exception_of_one_rank() -> None:
    before = spawn_ranks(process_id, 2)
    with pytest.raises(RankError) as caught:
        spawn_ranks(raise_on_rank_one, 2, backend="gloo", timeout_s=40)
    error = caught.value
    assert error.rank == 1
    assert isinstance(error.exceptions[1], KeyError)
    assert error.__cause__ is error.exceptions[1]
    assert 'raise KeyError("no such tensor")' in error.traceback
    assert "raise_on_rank_one" in str(error)
    assert "worker.py" not in error.traceback
    assert "dist.barrier()" in str(error) or "barrier" in error.stacks[0]
    assert not set(spawn_ranks(process_id, 2)) & set(before)


def test_exceptions_of_all_ranks_even_when_they_cannot_be_pickled() -> None:
    with pytest.raises(RankError, match="2 of 2 ranks failed") as caught:
        spawn_ranks(raise_everywhere, 2)
    assert sorted(caught.value.exceptions) == [0, 1]
    assert "cannot travel" in str(caught.value.exceptions[1])
    assert str(caught.value).count("raise Unpicklable(needed=rank)") == 2


def test_rank_killed() -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as caught:
        spawn_ranks(kill_rank_one, 2)
    assert list(caught.value.exceptions) == [1]


def test_rank_expected_to_die() -> None:
    assert spawn_ranks(kill_rank_one, 2, expect_dead={1}) == ["rank 0 survived", None]
    assert spawn_ranks(all_reduce_own_rank, 2, 1.0, backend="gloo") == [
        Answer(0, 1.0),
        Answer(1, 1.0),
    ]


def test_death_is_noticed_while_a_child_holds_the_socket() -> None:
    results = spawn_ranks(kill_rank_one_with_child, 2, expect_dead={1}, timeout_s=30)
    assert results[1] is None


def test_workers_differ_in_address_layout() -> None:
    layouts = spawn_ranks(address_of_new_mapping, 3)
    assert len(set(layouts)) == 3


def test_silent_exit_is_a_failure() -> None:
    with pytest.raises(RankError, match="rank 0 exited with code 3"):
        spawn_ranks(exit_quietly, 2, expect_dead={0})


def test_an_exit_that_is_expected_is_none() -> None:
    assert spawn_ranks(exit_quietly, 2, expect_exit={0})[0] is None


def test_an_interpreter_can_end_by_an_exception_that_nobody_catches(tmp_path: Path) -> None:
    said, ended = tmp_path / "said", tmp_path / "ended"
    told = spawn_ranks(raise_uncaught, 2, str(said), str(ended), expect_exit={0})
    assert told == [None, 1]
    assert said.read_text().rstrip().endswith("UncaughtError: nobody's")
    assert ended.read_text() == "the interpreter ran what is for its end"


def test_hang_ends_with_stacks() -> None:
    spawn_ranks(process_id, 2)  # so that the time limit is spent in the call
    with pytest.raises(RankTimeoutError, match=r"ranks \[0\] did not finish") as caught:
        spawn_ranks(wait_for_ever_on_rank_zero, 2, timeout_s=1)
    assert caught.value.rank == 0
    assert "in wait_for_ever_on_rank_zero" in caught.value.stacks[0]
    assert "test_spawn_ranks.py" in str(caught.value)


def test_groups_can_be_set_up_by_the_function() -> None:
    assert spawn_ranks(initialise_twice, 2) == [[2, 2], [2, 2]]


def test_no_rank_leaves_a_group_of_gloo_before_the_others() -> None:
    left = spawn_ranks(whether_rank_1_left_before, 2, backend="gloo", fresh=True)
    assert left == [False, False]


def test_calls_of_the_same_workers_meet_at_stores_of_their_own() -> None:
    for _ in range(3):
        assert spawn_ranks(initialise_by_environment, 2) == [2, 2]


def test_same_on_all_ranks() -> None:
    spawn_ranks(compare_values, 2, [torch.arange(5), torch.arange(5)])
    spawn_ranks(compare_values, 2, [{"a": 1}, {"a": 1}])
    nan = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    spawn_ranks(compare_values, 2, [nan, nan])
    with pytest.raises(RankError, match=r"value: ranks \[1\] differ from rank 0"):
        spawn_ranks(compare_values, 2, [torch.zeros(3), -torch.zeros(3)])


class LimitPassedError(Exception):
    pass


def test_a_limit_that_passes_while_workers_start_is_that_calls_alone() -> None:
    """Its workers come late: the next call takes them for nobody."""

    def interrupt(number: int, frame: object) -> None:
        raise LimitPassedError

    env = {"NOBODY_ELSES": "1"}  # so that nobody else has this starter
    starter = spawn_ranks(starter_id, 2, env=env, fresh=True)[0]
    before = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    os.kill(starter, signal.SIGSTOP)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(LimitPassedError):
            spawn_ranks(process_id, 1, env=env, fresh=True)
    finally:
        os.kill(starter, signal.SIGCONT)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)
    assert spawn_ranks(starter_id, 2, env=env, fresh=True) == [starter, starter]
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        spawn_ranks(kill_rank_one, 2, env=env, fresh=True)


def test_local_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="module-level function"):
        spawn_ranks(lambda rank, world_size: None, 2)
    with pytest.raises(ValueError, match="at least 1"):
        spawn_ranks(process_id, 0)
