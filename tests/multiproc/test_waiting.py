"""Jobs in good health whose ranks wait: it is said for whom meanwhile, and then they go on."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.base import config, unlisted
from deepytorch_core.c10d import backend
from deepytorch_core.hang import live, record, waiting
from deepytorch_core.testing import rank_store, spawn_ranks

HERE = os.path.basename(__file__)
LATE = 2
MOST_S = 40.0


class Said(io.StringIO):
    """Output of a rank; `flag` is there once it has said for whom it waits."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self._flag = flag

    def write(self, text: str) -> int:
        if "has waited" in text or "waits for rank(s)" in text:
            self._flag.touch()
        return super().write(text)


def prepare_data(flag: Path) -> None:
    """Keep the others waiting until one of them has said so, for `MOST_S` at most."""
    end = time.monotonic() + MOST_S
    while not flag.exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)  # a second line would come now


@contextlib.contextmanager
def job(rank: int, world_size: int, name: str, **options: Any) -> Iterator[None]:
    """A job with torch's default time limits, that tells of waits early, and once."""
    waiting.FIRST_S = 1.0
    waiting.AGAIN = 1000
    config.set_current(config.Options(**options))
    backend.register()
    dist.init_process_group("deepytorch", store=rank_store(name), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        config.set_current(None)


def all_reduce(group: Any) -> Any:
    data = torch.ones(3)
    dist.all_reduce(data, group=group)
    return data.tolist()


def waited_for(group: Any) -> Any:
    data = torch.ones(3)
    work = dist.all_reduce(data, group=group, async_op=True)
    work.wait()
    return data.tolist()


def received(group: Any) -> Any:
    data = torch.zeros(3)
    if dist.get_rank() == LATE:
        dist.send(data + 3, dst=0, group=group)
    if dist.get_rank() == 0:
        dist.recv(data, src=LATE, group=group)
    return data.tolist() if dist.get_rank() == 0 else [3.0] * 3


def monitored(group: Any) -> Any:
    group.monitored_barrier(timedelta(minutes=30))
    return [3.0] * 3


def followed(group: Any) -> Any:
    """Waited for by its future alone, as DDP's reducer does."""
    data = torch.ones(3)
    work = dist.all_reduce(data, group=group, async_op=True)
    work.get_future().wait()
    return data.tolist()


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "first": (all_reduce, "all_reduce #1 "),
    "second": (all_reduce, "all_reduce #2 "),
    "asynchronous": (waited_for, "all_reduce #3 "),
    "message": (received, "recv #1 "),
    "future": (followed, "all_reduce #4 "),
    "monitored": (monitored, "barrier #"),
}


def wait_in_all(rank: int, world_size: int, folder: str, collectives: str) -> dict[str, Any]:
    """In each case, what this rank said, and the result."""
    found = {}
    with job(rank, world_size, f"job {collectives}", collectives=collectives):
        group = dist.new_group(backend="deepytorch")
        for name, (act, _) in CASES.items():
            flag = Path(folder) / f"{collectives} {name}"
            with contextlib.redirect_stderr(Said(flag)) as said:
                if rank == LATE:
                    prepare_data(flag)
                result = act(group)
                rank_store(f"{collectives}/{name}").set(str(rank), "")
                rank_store(f"{collectives}/{name}").wait(
                    [str(member) for member in range(world_size)]
                )
            found[name] = (said.getvalue(), result)
    return found


@pytest.mark.parametrize("collectives", ["auto", pytest.param("stock", marks=pytest.mark.extended)])
def test_who_is_waited_for_is_said_while_it_lasts(collectives: str, tmp_path: Path) -> None:
    ranks = spawn_ranks(wait_in_all, 3, str(tmp_path), collectives, fresh=True, timeout_s=200)
    for name, (_, operation) in CASES.items():
        assert [rank[name][1] for rank in ranks] == [[3.0] * 3] * 3, name
        said = [rank[name][0].count("has waited") for rank in ranks]
        # On a busy machine the second may have begun to wait long before the first.
        assert said in ([1, 0, 0], [0, 1, 0], [1, 1, 0]), (name, ranks)
        told = ranks[0][name][0] + ranks[1][name][0]
        late = r"rank 2 \(node \S+, pid \d+\) (has not entered it|never sent to rank 0, which .*)"
        assert re.search(
            rf"rank [01] has waited \d\S* s in {operation}.* at {HERE}:\d+ .*: {late}; it is in "
            rf"{HERE}:\d+ time.sleep\(0.05\) for \d\S* s; the time limit of 1800 s ends the wait "
            r"in 17\d\d s$",
            told,
            re.M,
        ), (name, told)


STARTS: dict[str, tuple[Callable[[], Any], str]] = {
    "default group": (lambda: None, r"rank 0 has waited \d\S* s in all_reduce #1 .*"),
    "another group": (dist.new_group, r"rank 0 has waited \d\S* s in all_reduce #1 .*"),
    "gloo's part": (
        lambda: None,
        r"group 0 on rank 0: making gloo's part: waits for rank\(s\) 2, \d+ s by now, up to 1800 s",
    ),
}


def wait_in_starts(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, str]:
    """In each case, what this rank said while the last one had not come to where ranks meet."""
    found = {}
    config.set_current(config.Options(collectives="native"))
    backend.register()
    store = rank_store("starts")
    dist.init_process_group("deepytorch", store=store, rank=rank, world_size=world_size)
    for name in names:
        group = STARTS[name][0]()
        flag = Path(folder) / name
        with contextlib.redirect_stderr(Said(flag)) as said:
            if rank == LATE:
                prepare_data(flag)
            data = torch.ones(3).to_sparse() if name == "gloo's part" else torch.ones(3)
            dist.all_reduce(data, group=group)
            assert data.to_dense().tolist() == [3.0] * 3
            rank_store(name).set(str(rank), "")
            rank_store(name).wait([str(member) for member in range(world_size)])
        found[name] = said.getvalue()
    dist.destroy_process_group()
    config.set_current(None)
    return found


@pytest.mark.parametrize(
    "names",
    [["default group", "gloo's part"], pytest.param(list(STARTS), marks=pytest.mark.extended)],
    ids=["two", "all"],
)
def test_who_is_late_where_a_group_starts_is_said_soon(tmp_path: Path, names: list[str]) -> None:
    """Long before other waits are told of: those take longer than the late rank here."""
    assert waiting.START_S < 5 < MOST_S < waiting.FIRST_S
    ranks = spawn_ranks(wait_in_starts, 3, str(tmp_path), names, fresh=True, timeout_s=200)
    for name in names:
        assert (tmp_path / name).exists(), name
        told = "".join(rank[name] for rank in ranks[:LATE])
        assert re.search(STARTS[name][1], told), (name, ranks)
        assert "rank 2 (node" in told or "rank(s) 2" in told, (name, told)


def say_nothing(rank: int, world_size: int, folder: str) -> str:
    """A receive that is posted early, and other ranks that are busy meanwhile."""
    flag = Path(folder) / "never"
    with contextlib.redirect_stderr(Said(flag)) as said, job(rank, world_size, "quiet"):
        all_reduce(None)
        data = torch.zeros(3)
        posted = dist.irecv(data, src=1) if rank == 0 else None
        time.sleep(2.0)  # twice as long as what is told of
        meanwhile = said.getvalue()
        if rank == 1:
            dist.send(torch.ones(3), dst=0)
        if posted is not None:
            posted.wait()
            assert data.tolist() == [1.0] * 3
        all_reduce(None)
        return meanwhile


def test_what_is_only_posted_is_no_wait(tmp_path: Path) -> None:
    said = spawn_ranks(say_nothing, 2, str(tmp_path), fresh=True)
    assert not any("in recv #" in text for text in said), said


def wait_for_who_is_stopped(rank: int, world_size: int, folder: str) -> str:
    """The first rank is the one that is missing, and no part of it can run."""
    flag = Path(folder) / "stopped"
    with contextlib.redirect_stderr(Said(flag)) as said, job(rank, world_size, "stopped"):
        all_reduce(None)
        pids = rank_store("pids")
        pids.set(str(rank), str(os.getpid()))
        if rank == 2:
            first = int(pids.get("0"))
            os.kill(first, signal.SIGSTOP)
            prepare_data(flag)
            os.kill(first, signal.SIGCONT)
        if rank == 0:
            time.sleep(0.5)
        if rank != 2:
            dist.all_reduce(torch.ones(3), group=dist.group.WORLD)
        else:
            all_reduce(None)
        return said.getvalue()


def test_the_first_that_can_speak_does(tmp_path: Path) -> None:
    said = spawn_ranks(wait_for_who_is_stopped, 3, str(tmp_path), fresh=True)
    assert ["has waited" in text for text in said] == [False, True, False], said
    assert "rank 1 has waited " in said[1]
    assert re.search(r": rank 0 \(node .*\) .*; it is stopped by a signal", said[1]), said[1]


def wait_across_nodes(rank: int, world_size: int, folder: str) -> str:
    flag = Path(folder) / "across"
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(Said(flag)) as said,
    ):
        seen = live._records
        patch.setattr(
            live,
            "_records",
            lambda home: [process for process in seen(home) if process.pid == os.getpid()],
        )
        patch.setattr(live, "_node", lambda: f"node{rank}/")
        patch.setattr(record, "find", lambda: [os.getpid()])
        with job(rank, world_size, "across"):
            all_reduce(None)
            if rank == LATE:
                prepare_data(flag)
            all_reduce(None)
        return said.getvalue()


def test_ranks_on_other_nodes_are_asked(tmp_path: Path) -> None:
    said = spawn_ranks(
        wait_across_nodes,
        3,
        str(tmp_path),
        fresh=True,
        env={"DEEPYTORCH_NODE_ID": "a,b,c"},
        timeout_s=100,
    )
    assert "has waited" in said[0] + said[1], said  # each node's own; the second may be late
    assert "has waited" not in said[2]
    (line,) = [line for line in (said[0] + said[1]).splitlines() if "has waited" in line][:1]
    assert re.search(rf"rank 2 \(node .*\) has not entered it; it is in {HERE}:\d+ ", line), line


def threads_of_ours(rank: int, world_size: int) -> list[bool]:

    def watching() -> bool:
        return "deepytorch-waits" in unlisted.names().values()

    with job(rank, world_size, "threads"):
        found = [watching()]
    end = time.monotonic() + 10
    while watching() and time.monotonic() < end:
        time.sleep(0.01)
    return [*found, watching()]


def test_nobody_watches_when_the_group_is_gone() -> None:
    assert spawn_ranks(threads_of_ours, 2, fresh=True) == [[True, False]] * 2
