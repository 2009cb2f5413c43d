"""A job loses one of its two nodes and goes on with the other, by torchrun's own means.

Run by `make test-faults`. The nodes are two agents of torchrun on this machine; one is killed with
its ranks. The survivors' error names a lost rank, their agent starts them anew as a smaller job,
which resumes from the last checkpoint. The global batch stays the same, so the losses must, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import TCPStore

STEPS = 24
PAUSE_S = 0.25  # of a step, so that the kill falls between the first and the last
LIMIT_S = 110
SCRIPT = f"""
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import deepytorch

folder = sys.argv[1]
saved = os.path.join(folder, "saved.pt")
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
layers = [torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)]
model = torch.nn.Sequential(*layers).double()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
begin = 0
if os.path.exists(saved):
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["step"]
for step in range(begin, {STEPS}):
    chance = torch.Generator().manual_seed(step)
    batch = torch.randn(24, 16, dtype=torch.float64, generator=chance)
    loss = (wrapped(batch[rank::size]) - batch[rank::size].sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach_().div_(size))
    if rank == 0:
        torch.save(
            {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}},
            saved + ".new",
        )
        os.replace(saved + ".new", saved)
        native = deepytorch.report().native_calls > 0
        with open(os.path.join(folder, "log"), "a") as log:
            log.write(json.dumps([step, size, loss.item(), native]) + "\\n")
    time.sleep({PAUSE_S})
dist.destroy_process_group()
"""


@contextmanager
def agent(script: Path, folder: Path, port: int, nodes: str) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun as one node of two ranks; it has a session of its own, so that all of it can die."""
    # The first node is the default store's host, by a name that both resolve.
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node"),
        *("2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", "--rdzv-conf"),
        "is_host=false,last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=3",
        *("--monitor-interval", "0.2", str(script), str(folder)),
    ]
    with (folder / f"agent-{time.monotonic_ns()}").open("wb") as told:
        started = subprocess.Popen(
            command, stdout=told, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield started
        finally:
            kill(started)


def kill(started: subprocess.Popen[bytes]) -> None:
    """An agent and its ranks, which are in sessions of their own."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(started.pid)], capture_output=True, text=True
    )
    for pid in [*map(int, listed.stdout.split()), started.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    started.wait()


def rows(folder: Path) -> list[list[float]]:
    log = folder / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def said(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("agent-*")))


def rendezvous() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_job_that_loses_a_node_goes_on_with_the_other(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    stores = [rendezvous(), rendezvous()]
    with agent(script, whole, stores[0].port, "1") as only:
        assert only.wait(LIMIT_S) == 0, said(whole)
    with agent(script, broken, stores[1].port, "1:2") as survivor:
        with agent(script, broken, stores[1].port, "1:2"):
            limit = time.monotonic() + LIMIT_S
            while len(rows(broken)) < 4:
                assert time.monotonic() < limit, said(broken)
                assert survivor.poll() is None, said(broken)
                time.sleep(0.1)
        assert survivor.wait(LIMIT_S) == 0, said(broken)
    found = {int(step): (int(size), loss, native) for step, size, loss, native in rows(broken)}
    sizes = [found[step][0] for step in range(STEPS)]
    assert sizes[0] == 4
    assert sizes[-1] == 2
    assert sizes == sorted(sizes, reverse=True)
    assert all(native for _, _, native in found.values())
    expected = {int(step): loss for step, _, loss, _ in rows(whole)}
    for step in range(STEPS):
        assert found[step][1] == pytest.approx(expected[step], rel=1e-9), (step, sizes)
    assert "rank 2" in said(broken) or "rank 3" in said(broken)
