"""Ranks that a program forks itself, without a launcher that says which is which.

As notebooks have them: accelerate's notebook_launcher, Lightning's ddp_notebook, start_processes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CompletedProcess

from deepytorch_core.testing import run_program

PROGRAM = """
import os
import sys
import deepytorch
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.utils.data import DataLoader

FOLDER, *HOW = sys.argv[1:]

def tell(who):
    told = deepytorch.report()
    calls, loaders = sum(row.calls for row in told.rows), len(told.loaders)
    print(f"{who}: {calls} calls, {told.course['steps']} steps, {loaders} loaders", flush=True)

def train(rank):
    dist.init_process_group(
        "gloo", init_method=f"file://{FOLDER}/ranks", rank=rank, world_size=2
    )
    value = torch.full((3,), float(rank + 1))
    dist.all_reduce(value)
    if not HOW:
        dist.destroy_process_group()
    report = deepytorch.report()
    print(f"rank {report.rank} got {value[0].item()} from {len(report.rows)} kinds\\n", end="")

if HOW:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    dist.init_process_group(
        "gloo", init_method=f"file://{FOLDER}/parent", rank=0, world_size=1
    )
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
        optimizer.step()
    for _ in DataLoader(range(3)):
        pass
    tell("parent")
    if os.fork() == 0:
        optimizer.step()
        tell("child")
        if os.fork() == 0:
            tell("grandchild")
        else:
            os.wait()
        os._exit(0)
    os.wait()
    dist.destroy_process_group()
start_processes(train, nprocs=2, start_method="fork")
"""


def run(folder: Path, *arguments: str) -> CompletedProcess[str]:
    return run_program([sys.executable, "-c", PROGRAM, folder, *arguments])


def test_one_line_is_said_and_each_rank_knows_its_number_after_its_group(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 got 3.0 from 1 kinds",
        "rank 1 got 3.0 from 1 kinds",
    ]
    assert done.stderr.count("deepytorch: collectives of 2 ranks go through deepytorch") == 1


def test_children_of_a_process_that_had_groups_keep_to_stock(tmp_path: Path) -> None:
    """Nothing native of their parent's is there: what they would touch is not mapped.

    Nor does a child's report count what its parent did.
    """
    done = run(tmp_path, "after a group")
    assert done.returncode == 0, done.stderr
    said = "this process was made by fork() from one that had made groups before"
    assert done.stderr.count(f"deepytorch: keeping torch's own collectives: rank 0: {said}") == 1
    assert done.stderr.count("deepytorch: ") == 2, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "child: 0 calls, 1 steps, 0 loaders",
        "grandchild: 0 calls, 0 steps, 0 loaders",
        "parent: 3 calls, 3 steps, 1 loaders",
        "rank 0 got 3.0 from 0 kinds",
        "rank 1 got 3.0 from 0 kinds",
    ]


WITHOUT_TORCH = """
import os
import sys
from pathlib import Path
from deepytorch.integrations.common.horovod_rendezvous import LocalStore
from deepytorch_core import _core

def group(name):
    return _core.Communicator(LocalStore(Path(sys.argv[1])), 0, 1, name=name)

group("parent").close()
if os.fork() == 0:
    try:
        group("child")
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""


def test_without_torch_a_child_of_a_process_that_had_groups_gets_an_error(tmp_path: Path) -> None:
    done = run_program([sys.executable, "-c", WITHOUT_TORCH, tmp_path])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this process was made by fork() from one that had made groups")
