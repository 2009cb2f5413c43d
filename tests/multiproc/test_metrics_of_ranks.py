"""Prometheus metrics of ranks that a script starts itself: no launcher says which is which."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepytorch_core.base import config
from deepytorch_core.testing import free_port, run_program

PROGRAM = """
import re
import sys
from urllib.request import urlopen
import deepytorch
import torch.distributed as dist
from torch.multiprocessing import start_processes

FOLDER, PORT, HOW = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def serve(rank):
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/ranks", rank=rank, world_size=2)
    with urlopen(f"http://127.0.0.1:{PORT + rank}/metrics", timeout=20) as answer:
        labels = set(re.findall('[{,]rank="([0-9]+)"', answer.read().decode()))
    # In one write, also where Python is unbuffered: the other's line would come between.
    print(f"rank {rank} serves rank {','.join(labels)}\\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    start_processes(serve, nprocs=2, start_method=HOW)
"""


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.extended)])
def test_each_serves_its_own_at_the_port_plus_its_rank(tmp_path: Path, how: str) -> None:
    """The process that starts them, which has the option as well, takes none of their ports."""
    script = tmp_path / "ranks.py"
    script.write_text(PROGRAM)
    port = free_port()
    done = run_program(
        [sys.executable, script, tmp_path, str(port), how],
        env=config.child_environment(DEEPYTORCH_METRICS=str(port)),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 serves rank 0", "rank 1 serves rank 1"]
    for rank in range(2):
        place = f"http://127.0.0.1:{port + rank}/metrics"
        assert done.stderr.count(f"deepytorch: metrics of rank {rank} at {place}\n") == 1
    assert done.stderr.count("deepytorch: metrics ") == 2, done.stderr
