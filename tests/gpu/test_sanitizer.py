"""compute-sanitizer finds nothing in the device kernels: out of bounds, or racing in shared memory.

Small cases, since everything is many times slower under it; two ranks share a GPU where there is
one. Run by itself this file is what the sanitizer watches.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import needs_gpus, spawn_ranks

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH"
    ),
]

NATIVE = {
    "DEEPYTORCH_COLLECTIVES": "native",
    "DEEPYTORCH_TUNE": "off",
    "DEEPYTORCH_ERROR_HANDLING": "raise",
}
# Their warps signal each other by flags in shared memory, with acquire and release, where the tool
# knows barriers alone. ThreadSanitizer watches these on host threads: `make sanitize`.
BY_FLAGS = {"two_shot_all_reduce", "push_reduce_scatter", "push_exchange", "ring_exchange"}
BY_FLAGS |= {"tree_all_reduce"}
# In elements: lines, packets, and chunks that end within a vector.
COUNTS = [5, 4099, 300_003]


def _everything(rank: int, world_size: int) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for count in COUNTS:
        for dtype in [torch.float32, torch.bfloat16]:
            value = torch.full((count + 1,), rank + 1.0, dtype=dtype, device=device)[1:]
            dist.all_reduce(value)
            assert value.eq(sum(range(1, world_size + 1))).all()
            whole = torch.full((count * world_size,), rank + 1.0, dtype=dtype, device=device)
            part = torch.empty(count, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(part, whole)
            assert part.eq(sum(range(1, world_size + 1))).all()
            dist.all_gather_into_tensor(whole, torch.full_like(part, rank))
            assert whole[:count].eq(0).all()
            assert whole[-count:].eq(world_size - 1).all()
            received = torch.empty_like(whole)
            dist.all_to_all_single(received, torch.full_like(whole, rank))
            assert received[-count:].eq(world_size - 1).all()
            dist.broadcast(part, 1)
    torch.cuda.synchronize()


def _watched(tool: str) -> str:
    found = subprocess.run(
        ["compute-sanitizer", f"--tool={tool}", "--target-processes=all", sys.executable, __file__],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    said = found.stdout + found.stderr
    assert found.returncode == 0, said[-6000:]
    assert "done" in said, said[-6000:]
    assert "SUMMARY" in said, said[-6000:]
    return said


def test_memory_is_within_bounds() -> None:
    said = _watched("memcheck")
    summaries = [line for line in said.splitlines() if "ERROR SUMMARY" in line]
    assert all(": 0 errors" in line for line in summaries), said[-6000:]


def test_shared_memory_is_not_raced_for() -> None:
    said = _watched("racecheck")
    raced = set(re.findall(r"(\w+)_kernel\b", said))
    assert raced <= BY_FLAGS, said[-6000:]


def _along_trees(rank: int, world_size: int) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for count in COUNTS:
        for dtype in [torch.float32, torch.bfloat16]:
            value = torch.full((count + 1,), rank + 1.0, dtype=dtype, device=device)[1:]
            dist.all_reduce(value)
            assert value.eq(sum(range(1, world_size + 1))).all()
    torch.cuda.synchronize()


if __name__ == "__main__":
    backend = "cuda:deepytorch,cpu:deepytorch"
    spawn_ranks(_everything, 2, env=NATIVE, timeout_s=300.0, backend=backend)
    links = {**NATIVE, "DEEPYTORCH_EMULATE_LINKS": "-1-,1-1,-1-"}
    spawn_ranks(_along_trees, 3, env=links, timeout_s=300.0, backend=backend)
    print("done")
