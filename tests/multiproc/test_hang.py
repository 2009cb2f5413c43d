"""Jobs that really hang: the verdict from outside while they do, and in the error when they end.

Rank 0 looks on; ranks 1 to 3 have a group of their own, in which one does not do its part.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch.cli import hang
from deepytorch_core.base import config, unlisted
from deepytorch_core.c10d import backend
from deepytorch_core.hang import inquiry, live, record, store_limit
from deepytorch_core.testing import rank_store, spawn_ranks

MEMBERS = [1, 2, 3]
CULPRIT = 2
HERE = os.path.basename(__file__)


@contextmanager
def job(
    rank: int, world_size: int, name: str, timeout_s: float = 100, **options: Any
) -> Iterator[dist.ProcessGroup]:
    """A job of its own in these processes: yields the group of MEMBERS, in which all have met."""
    config.set_current(config.Options(**options))
    backend.register()
    dist.init_process_group(
        "deepytorch", store=rank_store(f"job/{name}"), rank=rank, world_size=world_size
    )
    group = dist.new_group(MEMBERS, timeout=timedelta(seconds=100), group_desc="dp")
    if rank in MEMBERS:
        dist.all_reduce(torch.ones(10), group=group)
        group.set_timeout(timedelta(seconds=timeout_s))
    try:
        yield group
    finally:
        dist.destroy_process_group()
        config.set_current(None)


def report(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "deepytorch.cli", "report", "--hang", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def spin_until(flag: Path) -> None:
    while not flag.exists():
        pass


def look_on(rank: int, world_size: int, collectives: str, how: str, folder: str) -> dict[str, Any]:
    """One rank of a job in which rank 2 hangs `how`; rank 0 returns what the command says."""
    flag = Path(folder) / f"{collectives}-{how}"
    with job(rank, world_size, f"{collectives}-{how}", collectives=collectives) as group:
        pids = rank_store(f"pids/{collectives}-{how}")
        pids.set(str(rank), str(os.getpid()))
        if rank == CULPRIT:
            spin_until(flag)
        if rank in MEMBERS:
            dist.all_reduce(torch.ones(10), group=group)
            return {}
        culprit = int(pids.get(str(CULPRIT)))
        pids.wait([str(other) for other in MEMBERS])
        time.sleep(0.3)  # the verdict may be asked for at any time; now there is one
        if how == "stopped":
            os.kill(culprit, signal.SIGSTOP)
        try:
            (found,) = report("--pid", str(culprit))
        finally:
            os.kill(culprit, signal.SIGCONT)
            flag.touch()
        return {**found["verdict"], "job": found, "pid": culprit}


def look_on_all(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    cases = [("native", "loop"), ("stock", "stopped")]
    return {f"{kind} {how}": look_on(rank, world_size, kind, how, folder) for kind, how in cases}


def test_the_verdict_from_outside(tmp_path: Path) -> None:
    found, *_ = spawn_ranks(look_on_all, 4, str(tmp_path), backend=None, timeout_s=100)
    for name, case in found.items():
        assert case["ranks"] == [CULPRIT], (name, case["sentence"])
        assert case["kind"] == ("stopped" if name.endswith("stopped") else "never entered"), name
        assert case["job"]["not_on_this_node"] == []
        assert [rank["rank"] for rank in case["job"]["ranks"]] == [0, 1, 2, 3]
    loop, stopped = found["native loop"], found["stock stopped"]
    assert re.fullmatch(
        rf"rank 2 \(node \S+, pid {loop['pid']}\) never entered all_reduce #2 of group \S+ "
        rf"\(40 bytes float32\); it is in {HERE}:\d+ (pass|while not flag.exists\(\):) "
        r"for \d+(\.\d)? s",
        loop["sentence"],
    )
    assert "never entered all_reduce #2" in stopped["sentence"]
    assert f"kill -CONT {stopped['pid']}" in stopped["sentence"]


# Each rank on a node of its own, as far as groups are concerned.
NODES = {"DEEPYTORCH_NODE_ID": "a,b,c,d"}


def alone(patch: pytest.MonkeyPatch, rank: int) -> None:
    """As if this rank were alone on its node: it sees no other's process."""
    seen = live._records
    patch.setattr(
        live,
        "_records",
        lambda home: [process for process in seen(home) if process.pid == os.getpid()],
    )
    patch.setattr(live, "_node", lambda: f"node{rank}/")
    patch.setattr(record, "find", lambda: [os.getpid()])


def left_behind() -> list[str]:
    """Return what ranks said of themselves when asked, as the job's store still has it."""
    store = store_limit.server_below(live._home.store)
    keys = [key for key in store.list_keys() if "/asked" in key]
    assert keys, "the store says what it has"
    return [key for key in keys if "/rank/" in key and store.get(key)]


def ask_across(rank: int, world_size: int, collectives: str) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        alone(stack.enter_context(pytest.MonkeyPatch.context()), rank)
        name = f"across-{collectives}"
        group = stack.enter_context(job(rank, world_size, name, collectives=collectives))
        done = rank_store(f"across/{collectives}")
        if rank == CULPRIT:
            done.get("asked")
        if rank in MEMBERS:
            dist.all_reduce(torch.ones(11), group=group)
            return {}
        time.sleep(1.5)  # who waits for less is not waiting yet
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                hang.show([], None, as_json=True, flight_recorder=None)
            answer = inquiry.ask([os.getpid()], how=inquiry.AGAIN)
            assert len(answer.ranks) == world_size - 1
            until(lambda: not left_behind())
        finally:
            done.set("asked", "")
        (found,) = json.loads(printed.getvalue())
        return found


@pytest.mark.parametrize(
    "collectives", [pytest.param("native", marks=pytest.mark.extended), "stock"]
)
def test_ranks_on_other_nodes_are_asked_through_the_store(collectives: str) -> None:
    found, *_ = spawn_ranks(ask_across, 4, collectives, backend=None, env=NODES, timeout_s=100)
    assert found["verdict"]["kind"] == "never entered", found["verdict"]
    assert found["verdict"]["ranks"] == [CULPRIT]
    assert "never entered all_reduce #2 of group" in found["verdict"]["sentence"]
    assert f"it is in {HERE}:" in found["verdict"]["sentence"]
    assert 'done.get("asked")' in found["verdict"]["sentence"]
    assert [entry["rank"] for entry in found["ranks"]] == [0, 1, 2, 3]
    assert found["not_on_this_node"] == MEMBERS
    assert found["without_answer"] == []


def ask_while_it_goes_on(rank: int, world_size: int) -> tuple[int, dict[str, Any]]:
    """How many right results came meanwhile; and what the command said of it."""
    with contextlib.ExitStack() as stack:
        alone(stack.enter_context(pytest.MonkeyPatch.context()), rank)
        group = stack.enter_context(job(rank, world_size, "goes on", collectives="native"))
        done, rounds, found = rank_store("goes on"), 0, {}
        if rank == 0:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                hang.show([], None, as_json=True, flight_recorder=None)
            done.set("asked", "")
            (found,) = json.loads(printed.getvalue())
        while rank in MEMBERS:
            data = torch.full((13,), float(rank + rounds))
            data[-1] = rank == MEMBERS[0] and done.check(["asked"])  # the same for all of them
            dist.all_reduce(data, group=group)
            assert data[:-1].eq(sum(MEMBERS) + 3 * rounds).all()
            rounds += 1
            if data[-1] > 0:
                break
            time.sleep(0.01)
        return rounds, found


def test_a_job_that_goes_on_is_asked_and_not_disturbed() -> None:
    results = spawn_ranks(ask_while_it_goes_on, 4, backend=None, env=NODES, timeout_s=100)
    _, found = results[0]
    assert found["verdict"]["kind"] == "no hang", found["verdict"]
    assert found["not_on_this_node"] == MEMBERS
    assert found["without_answer"] == []
    assert {rounds for rounds, _ in results[1:]} == {results[1][0]}
    assert results[1][0] > 1


def listeners() -> list[str]:
    return [name for name in unlisted.names().values() if name == "deepytorch-hang"]


def listen_until_all_are_known(rank: int, world_size: int) -> list[bool]:
    backend.register()
    found = []
    for nodes in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LOCAL_WORLD_SIZE")
            if nodes == 2:
                patch.setattr(live, "_node", lambda: f"node{rank}/")
            dist.init_process_group(
                "deepytorch", store=rank_store(f"{nodes}"), rank=rank, world_size=world_size
            )
            found.append(live._home.desk is not None)
            if nodes == 1:
                until(lambda: not listeners())
            else:
                time.sleep(2.5)  # two looks
                found.append(bool(listeners()))
            dist.destroy_process_group()
            until(lambda: not listeners())
    return found


def test_where_the_launcher_does_not_say_it_ranks_find_out_that_they_are_on_one_node() -> None:
    results = spawn_ranks(listen_until_all_are_known, 2, backend=None, timeout_s=60)
    assert results == [[True, True, True]] * 2


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def time_out(rank: int, world_size: int, collectives: str, *, apart: bool) -> str:
    """The error of a rank whose operation times out because rank 2 does something else."""
    name = f"{collectives}-{apart}"
    with job(rank, world_size, name, timeout_s=1, collectives=collectives) as group:
        done = rank_store(f"done/{name}")
        text = ""
        if rank in (1, 3):
            text = error_of(lambda: dist.all_reduce(torch.ones(10), group=group))
            done.set(str(rank), "")
        done.wait(["1", "3"])
    return text


def time_out_everywhere(rank: int, world_size: int, kinds: list[str]) -> list[str]:
    texts = [time_out(rank, world_size, kind, apart=False) for kind in kinds]
    with pytest.MonkeyPatch.context() as patch:
        # As if each rank were on a node of its own: none sees another's process.
        patch.setattr(config, "spans_nodes", lambda: True)
        seen = live._records
        patch.setattr(
            live,
            "_records",
            lambda home: [process for process in seen(home) if process.pid == os.getpid()],
        )
        patch.setattr(live, "_node", lambda: f"node{rank}/")
        # The test is of what is said, not of how soon a busy machine says it.
        patch.setattr(live, "_ANSWER_LIMIT_S", 20.0)
        patch.setattr(live, "_VERDICT_LIMIT_S", 30.0)
        texts += [time_out(rank, world_size, kind, apart=True) for kind in kinds]
    return texts


@pytest.mark.parametrize(
    "kinds", [["native"], pytest.param(["stock"], marks=pytest.mark.extended)], ids=" ".join
)
def test_the_error_begins_with_the_sentence(kinds: list[str]) -> None:
    texts = spawn_ranks(time_out_everywhere, 4, kinds, backend=None, timeout_s=100)
    names = [*kinds, *(f"{kind}, apart" for kind in kinds)]
    for kind, of_one, of_three in zip(names, texts[1], texts[3], strict=True):
        first = of_one.splitlines()[0]
        assert first.startswith("rank 2 (node "), kind
        assert "never entered all_reduce #2 of group" in first, kind
        assert f"it is in {HERE}:" in first, kind
        assert 'done.wait(["1", "3"])' in first, kind
        assert of_three.splitlines()[0] == first, kind
        assert len(of_one.splitlines()) > 1, kind


def time_out_twice(rank: int, world_size: int) -> list[str]:
    texts = []
    for late in (2, 3):  # in groups that are alike, over one store
        with job(rank, world_size, "again", timeout_s=1, collectives="native") as group:
            waiting = [str(member) for member in MEMBERS if member != late]
            done = rank_store(f"done/again-{late}")
            if str(rank) in waiting:
                texts.append(error_of(lambda: dist.all_reduce(torch.ones(10), group=group)))
                done.set(str(rank), "")
            done.wait(waiting)
    return texts


def test_a_second_group_over_the_same_store_has_a_verdict_of_its_own() -> None:
    first, second = spawn_ranks(time_out_twice, 4, backend=None, timeout_s=60)[1]
    assert first.startswith("rank 2 (node ")
    assert second.startswith("rank 3 (node ")


def exit_early(rank: int, world_size: int) -> str:
    with job(rank, world_size, "exit", collectives="stock") as group:
        if rank == CULPRIT:
            rank_store("exit").get("gone in a moment")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            time.sleep(0.3)
            rank_store("exit").set("gone in a moment", "")
            return ""
        return error_of(lambda: dist.all_reduce(torch.ones(10), group=group))


def test_a_rank_that_left_early_is_named() -> None:
    texts = spawn_ranks(exit_early, 4, backend=None, expect_dead={CULPRIT}, timeout_s=60)
    for rank in (1, 3):
        assert re.match(r"rank 2 \(node \S+, pid \d+\) never entered all_reduce #2", texts[rank])
        assert "its process has ended" in texts[rank]


def outlive_the_store(rank: int, world_size: int, meanwhile: bool) -> str:
    """The error of rank 1 after rank 0 has ended, and the job's store with it."""
    config.set_current(config.Options(collectives="stock"))
    backend.register()
    own = rank_store(f"outlive/{meanwhile}")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        own.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(own.get("port")), world_size)
    dist.init_process_group("deepytorch", store=store, rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(3))
    own.set(f"through{rank}", "")
    own.wait([f"through{each}" for each in range(world_size)])
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.MonkeyPatch.context() as patch:
        if meanwhile:  # it seems to be there when it is looked for
            looks, look = [""], live._unreachable
            patch.setattr(live, "_unreachable", lambda store: looks.pop() if looks else look(store))
            patch.setattr(live, "_LOST_LIMIT_S", 0.0)
        return error_of(lambda: dist.all_reduce(torch.ones(7)))


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_rank_that_ended_with_the_store_is_named(meanwhile: bool) -> None:
    _, text = spawn_ranks(
        outlive_the_store, 2, meanwhile, backend=None, expect_dead={0}, timeout_s=60
    )
    first = text.splitlines()[0]
    # Its number is known as long as the record of one who is not reaped yet is there.
    named = r"rank 0 \(node [^ ,]+(, pid \d+)?\) never entered all_reduce #2 of group"
    assert re.match(named, first), text
    assert "its process has ended" in first


def differ_in_operation(rank: int, group: dist.ProcessGroup) -> None:
    if rank == CULPRIT:
        dist.broadcast(torch.ones(10), 1, group=group)
    else:
        dist.all_reduce(torch.ones(10), group=group)


def differ_in_size(rank: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(10 + (rank == CULPRIT)), group=group)


def differ_in_dtype(rank: int, group: dist.ProcessGroup) -> None:
    dtype = torch.float64 if rank == CULPRIT else torch.float32
    work = dist.all_reduce(torch.ones(10, dtype=dtype), group=group, async_op=True)
    assert work is not None
    work.wait()


def differ_in_reduce_op(rank: int, group: dist.ProcessGroup) -> None:
    op = dist.ReduceOp.MAX if rank == CULPRIT else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(10), op, group=group)


def differ_in_order(rank: int, group: dist.ProcessGroup) -> None:
    calls = [
        lambda: dist.all_reduce(torch.ones(10), group=group),
        lambda: dist.barrier(group=group),
    ]
    for call in reversed(calls) if rank == CULPRIT else calls:
        call()


DIFFERENCES: dict[str, tuple[Callable[[int, dist.ProcessGroup], None], str, str]] = {
    "operation": (differ_in_operation, "all_reduce of 10 x Float, sum", "broadcast of 10 x Float"),
    "size": (differ_in_size, "10 x Float", "11 x Float"),
    "dtype": (differ_in_dtype, "10 x Float", "10 x Double"),
    "reduce op": (differ_in_reduce_op, "sum", "max"),
    "order": (differ_in_order, "all_reduce", "barrier"),
}


def disagree(rank: int, world_size: int, collectives: str) -> dict[str, str]:
    texts = {}
    with job(
        rank, world_size, f"debug-{collectives}", collectives=collectives, debug=True
    ) as group:
        for name, (differ, _, _) in DIFFERENCES.items():
            if rank in MEMBERS:
                texts[name] = error_of(lambda differ=differ: differ(rank, group))
                # Nobody has started anything, so all are in step.
                value = torch.ones(5)
                dist.all_reduce(value, group=group)
                assert torch.equal(value, torch.full((5,), 3.0))
                if collectives == "native":  # gloo has no parts of several sizes
                    parts = [torch.ones(n) for n in MEMBERS]
                    dist.all_gather(parts, torch.full((rank,), float(rank)), group=group)
                    assert [part.tolist() for part in parts] == [[n] * n for n in MEMBERS]
    return texts


def disagree_everywhere(rank: int, world_size: int) -> list[dict[str, str]]:
    return [disagree(rank, world_size, kind) for kind in ("stock", "native")]


def test_debug_compares_what_ranks_are_about_to_start() -> None:
    for results in zip(
        *spawn_ranks(disagree_everywhere, 4, backend=None, timeout_s=60), strict=True
    ):
        for name, (_, first, other) in DIFFERENCES.items():
            texts = {results[rank][name].partition("; found before")[0] for rank in MEMBERS}
            assert len(texts) == 1, name
            text = texts.pop()
            assert "ranks entered different operations" in text
            # In the group's own ranks.
            assert re.search(
                rf"rank 0 .*{first}.* at {HERE}:\d+, rank 1 .*{other}.* at {HERE}", text
            )


def wait_for_a_slow_rank(rank: int, world_size: int) -> Any:
    from deepytorch_core.report.summary import report as make

    with job(rank, world_size, "slow", collectives="native") as group:
        here = rank_store("here")
        for step in range(5 if rank in MEMBERS else 0):
            if rank == 3:
                here.wait([f"{step}/1", f"{step}/2"])
                time.sleep(0.2)
            here.set(f"{step}/{rank}", "")
            dist.all_reduce(torch.ones(10), group=group)
        name = dist.group.WORLD.group_name if rank == 0 else group.group_name
        return {row.group: row for row in make().waiting}.get(name)


def test_the_report_names_the_slowest_rank() -> None:
    results = spawn_ranks(wait_for_a_slow_rank, 4, backend=None, timeout_s=60)
    for rank in MEMBERS:
        found = results[rank]
        assert found.slowest == 3
        assert found.operations == 6
        assert found.times_last >= 5
        assert found.cost_us == results[1].cost_us
    assert results[3].waited_us < results[1].waited_us
