"""Processes that a script starts under a launcher: whether they are ranks, and can meet."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.distributed import distributed_c10d
from torch.utils.data import _utils

from deepytorch.cli import runner
from deepytorch_core.base.child_ranks import Companion

ADDRESS = ("127.0.0.1", 29400)


def meet(rank: int, *others: int, url: str = "env://") -> tuple[int, ...]:
    distributed_c10d.rendezvous(url, rank)  # type: ignore[attr-defined]
    return (rank, *others)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return what ranks met by, under a launcher that serves the store at `ADDRESS`."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(distributed_c10d, "rendezvous", lambda *args: found.append(args))
    monkeypatch.setenv("MASTER_ADDR", ADDRESS[0])
    monkeypatch.setenv("MASTER_PORT", str(ADDRESS[1]))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return found


@pytest.mark.parametrize(
    ("url", "is_rank", "leaves_mark"),
    [("env://", False, True), ("tcp://h:1", True, True), ("tcp://h:1", False, False)],
)
def test_a_process_that_forms_a_group_leaves_a_mark(
    url: str, is_rank: bool, leaves_mark: bool, met: list[Any], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    sent = pickle.loads(pickle.dumps(Companion(ADDRESS, str(mark))))  # as to one that is spawned
    assert not mark.exists()
    assert sent.run(meet, is_rank, 1, 2, url=url) == (1, 2)
    assert met == [(url, 1)]
    assert mark.exists() == leaves_mark


def test_ranks_do_not_wait_where_nobody_serves(
    met: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    companion = Companion(ADDRESS)
    monkeypatch.setenv("MASTER_PORT", "29555")
    with pytest.raises(
        RuntimeError, match=r"meet others at 127\.0\.0\.1:29555, where nobody serves"
    ):
        companion.run(meet, False, 0)
    assert not met
    assert companion.run(meet, False, 0, url="tcp://127.0.0.1:29555") == (0,)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")  # rank 0 of the script's own serves
    assert companion.run(meet, False, 0) == (0,)
    assert len(met) == 2


def test_the_launchers_own_address_is_served(met: list[Any]) -> None:
    assert Companion(ADDRESS).run(meet, False, 3) == (3,)
    assert met == [("env://", 3)]


def test_processes_of_the_scripts_own_are_accompanied(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(BaseProcess, "start", lambda process: started.append(process._target))
    wanted = [True, True, False]
    companion = Companion(None)
    companion.watch(lambda: wanted.pop(0))
    for target in (meet, print, meet, _utils.worker._worker_loop, None):
        multiprocessing.Process(target=target).start()  # the loader's worker asks nobody
    assert [called.args if called is not meet else called for called in started[:3]] == [
        (meet, False),
        (print, False),
        meet,
    ]
    assert started[0].func == companion.run
    assert started[3:] == [_utils.worker._worker_loop, None]


def test_spawned_processes_that_the_script_waits_for_are_taken_for_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True) -> None:
        started.append((getattr(fn, "args", fn), args, nprocs))

    for name in ("torch.multiprocessing.spawn", "torch.multiprocessing"):
        monkeypatch.setattr(sys.modules[name], "start_processes", start_processes)
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)  # puts it back
    runner.watch_for_own_ranks(Companion(None))
    torch.multiprocessing.start_processes(print, (1,), nprocs=2)
    torch.multiprocessing.start_processes(fn=print, args=(1,))
    torch.multiprocessing.start_processes(print, (1,), 2, False)
    accompanied = (print, True)
    beside = (print, False)
    assert started == [(accompanied, (1,), 2), (accompanied, (1,), 1), (beside, (1,), 2)]
    assert capsys.readouterr().err.count("the script starts processes itself") == 3
