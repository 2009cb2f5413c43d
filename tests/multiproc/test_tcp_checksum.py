"""`DEEPYTORCH_TCP_CHECKSUM`: a bit that changes between two nodes is an error that says whose.

It changes below the core, in the system call that sends it (`damaging_line.cpp`).
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.base import config
from deepytorch_core.testing import spawn_ranks

ONE_EACH = {"DEEPYTORCH_NODE_ID": "a,b"}
DAMAGED = 1
COUNT = 5001

OPS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor: dist.broadcast(tensor, DAMAGED),
}


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = config.compiler()
    assert compiler is not None
    library = tmp_path_factory.mktemp("line") / "damaging_line.so"
    source = Path(__file__).with_name("damaging_line.cpp")
    command = [*compiler, "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def over_a_bad_line(rank: int, world_size: int, op: str, library: str) -> tuple[list[str], int]:
    """Return what two calls say ("": nothing) once the line from one rank is bad; bits changed."""
    good = torch.full((COUNT,), float(rank + 1))
    dist.all_reduce(good)
    assert torch.equal(good, torch.full((COUNT,), 3.0))
    dist.barrier()
    line = ctypes.CDLL(library)
    if rank == DAMAGED:
        ctypes.c_int.in_dll(line, "damaging").value = 1
    said = []
    for call in (OPS[op], dist.all_reduce):
        try:
            call(torch.full((COUNT,), float(rank + 1)))
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said, ctypes.c_int.in_dll(line, "damaged").value


def outcome(line: Path, op: str, checksum: str) -> list[tuple[list[str], int]]:
    env = {**ONE_EACH, "LD_PRELOAD": str(line), "DEEPYTORCH_TCP_CHECKSUM": checksum}
    return spawn_ranks(over_a_bad_line, 2, op, str(line), backend="deepytorch", env=env, fresh=True)


@pytest.mark.parametrize("op", OPS)
def test_damage_on_the_way_is_an_error_that_names_whose_data_it_was(line: Path, op: str) -> None:
    (receiver, _), (sender, changed) = outcome(line, op, "1")
    assert changed >= 1
    assert f"{op} #" in receiver[0], receiver
    assert f"rank {DAMAGED}" in receiver[0], receiver
    assert "do not match their checksum" in receiver[0], receiver
    # The sender may be done with the call; the group's end reaches it by the next one.
    assert "do not match their checksum" in sender[1], sender


def test_nothing_is_compared_without_it(line: Path) -> None:
    """Else the other tests would show that some check is made, not that this one is."""
    (receiver, _), (sender, changed) = outcome(line, "all_reduce", "0")
    assert changed >= 1
    assert "checksum" not in "".join(receiver + sender), receiver
