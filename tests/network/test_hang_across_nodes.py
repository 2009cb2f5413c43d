"""Why a job over several nodes hangs, asked for on one of them.

The nodes have process namespaces and names of their own, too: none sees another's processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.testing.emulation import Network, Setting

pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None or shutil.which("nsenter") is None,
    reason="util-linux is not installed",
)

SCRIPT = """
import ctypes, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from deepytorch_core.c10d import backend

folder, late, holds_gil = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
backend.register()
dist.init_process_group("deepytorch")
rank = dist.get_rank()
dist.all_reduce(torch.ones(5))
(folder / f"ready{rank}").touch()
if rank == late:
    while not (folder / "go").exists(): time.sleep(0.05)  # one line, whenever it is looked at
work = dist.all_reduce(torch.ones(7), async_op=True)
if rank == holds_gil:
    ctypes.PyDLL(None).sleep(200)
work.wait()
(folder / f"done{rank}").touch()
"""
LINE = 'train.py:14 while not (folder / "go").exists(): time.sleep(0.05)'


class Job:
    """Ranks in order, as many on each node, and the command on a node."""

    def __init__(self, network: Network, folder: Path, *, per_node: int) -> None:
        self.network = network
        self.folder = folder
        self.per_node = per_node
        self.size = network.num_nodes * per_node
        self._stack = ExitStack()
        self.first: list[int] = []  # of each node's processes, the one that started the others

    def start(self, late: int, holds_gil: int = -1, *, says_local_size: bool = True) -> None:
        script = self.folder / "train.py"
        script.write_text(SCRIPT)
        for node in range(self.network.num_nodes):
            ranks = range(node * self.per_node, (node + 1) * self.per_node)
            begin = " ".join(
                f"RANK={rank} LOCAL_RANK={local} {sys.executable} {script} {self.folder} {late} "
                f"{holds_gil} &"
                for local, rank in enumerate(ranks)
            )
            command = f"hostname node{'ab'[node]}; unset DEEPYTORCH_NODE_ID; {begin} wait"
            apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
            variables = {
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.per_node) if says_local_size else "",
                "MASTER_ADDR": self.network.address(0),
                "MASTER_PORT": "29511",
                "OMP_NUM_THREADS": "1",
            }
            started = self.network.start(
                node,
                [*apart, "sh", "-c", command],
                env=os.environ | variables,  # noqa: TID251
                start_new_session=True,
            )
            self._stack.callback(started.wait)
            self._stack.callback(started.kill)
            children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
            until(lambda: children.read_text().split(), "the node's first process")  # noqa: B023
            self.first.append(int(children.read_text()))
        for rank in range(self.size):
            until((self.folder / f"ready{rank}").exists, f"rank {rank}")

    def close(self) -> None:
        self._stack.close()

    def report(self, node: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "deepytorch.cli", "report", "--hang", "--json"]
        where = ["nsenter", "-t", str(self.first[node]), "--pid", "--mount", "--uts", "--net"]
        done = subprocess.run([*where, *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)
        return found

    def ranks_on(self, node: int) -> list[int]:
        """Their processes, by the numbers that they have here."""
        children = Path(f"/proc/{self.first[node]}/task/{self.first[node]}/children")
        return [int(pid) for pid in children.read_text().split()]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)


@contextmanager
def job_on(folder: Path, *, per_node: int) -> Iterator[Job]:
    with Network(2, Setting()) as network:
        job = Job(network, folder, per_node=per_node)
        try:
            yield job
        finally:
            job.close()


# A rank of another node is to blame in the test below, too.
@pytest.mark.extended
def test_the_rank_to_blame_is_on_another_node(tmp_path: Path) -> None:
    with job_on(tmp_path, per_node=2) as job:
        job.start(late=3, holds_gil=0)  # rank 0 would be asked first, and can't answer
        time.sleep(2)  # who waits for less is not waiting yet
        found = job.report(0)
        assert found["verdict"]["ranks"] == [3], found["verdict"]
        assert found["verdict"]["kind"] == "never entered"
        assert found["verdict"]["sentence"].startswith("rank 3 (node nodeb, pid ")
        assert "never entered all_reduce #2 of group" in found["verdict"]["sentence"]
        assert LINE in found["verdict"]["sentence"]
        assert [entry["rank"] for entry in found["ranks"]] == [0, 1, 2, 3]
        assert [entry["host"] for entry in found["ranks"]] == ["nodea"] * 2 + ["nodeb"] * 2
        assert all("train.py" in entry["stacks"] for entry in found["ranks"])
        assert found["not_on_this_node"] == [2, 3]
        assert found["without_answer"] == []
        assert found["why_not_asked"] == ""
        # Asked where it is, the others are elsewhere.
        there = job.report(1)
        assert there["verdict"]["ranks"] == [3], there["verdict"]
        assert there["not_on_this_node"] == [0, 1]
        # Rank 0 has answered, too: rank 1 looked at it.
        assert there["without_answer"] == []


def test_a_node_that_does_not_answer_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    with job_on(tmp_path, per_node=1) as job:
        job.start(late=1, says_local_size=False)  # so no variable says that there are two nodes
        time.sleep(2)
        (stopped,) = job.ranks_on(1)
        os.kill(stopped, signal.SIGSTOP)
        started = time.monotonic()
        found = job.report(0)
        took_s = time.monotonic() - started
        os.kill(stopped, signal.SIGCONT)
        assert found["without_answer"] == [1]
        assert found["verdict"]["ranks"] == [1]
        assert found["verdict"]["sentence"].startswith("rank 1 (node nodeb, pid ")
        assert "nobody on its node answered within 5 s" in found["verdict"]["sentence"]
        assert took_s < 40  # which is bounded, by 8 s and the command's start
        # Once it can, it answers.
        assert LINE in job.report(0)["verdict"]["sentence"]
        (tmp_path / "go").touch()
        for rank in range(2):
            until((tmp_path / f"done{rank}").exists, f"the end of rank {rank}")
