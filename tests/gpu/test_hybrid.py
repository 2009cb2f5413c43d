"""All-reduces that CPU-Reduce and NCCL divide among them, without peer access (emulated).

What the ranks go by is a profile in which the divided plan is the fastest, whatever it is here.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import assert_same_on_all_ranks, needs_gpus, spawn_ranks
from deepytorch_core.testing.tensors import rank_gpu

# NCCL refuses ranks that share a GPU.
pytestmark = [pytest.mark.gpu, needs_gpus(2), pytest.mark.timeout(240)]

EMULATED = {"NCCL_P2P_DISABLE": "1", "DEEPYTORCH_ERROR_HANDLING": "raise"}
BACKEND = "cuda:deepytorch,cpu:deepytorch"
WORLD_SIZE = min(4, torch.cuda.device_count())
# In elements: whole chunks, and odd ones.
COUNTS = [4 << 20, (5 << 20) + 3, (33 << 20) - 1]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def _in_bytes() -> dict[int, tuple[int, torch.dtype]]:
    return {count * dtype.itemsize: (count, dtype) for dtype in ROUNDING for count in COUNTS}


def _measure(rank: int, world_size: int) -> None:
    for _, (count, dtype) in sorted(_in_bytes().items()):
        dist.all_reduce(torch.ones(count, dtype=dtype, device=rank_gpu(rank)))
    torch.cuda.synchronize()


def _prefer_divided(profile: Path) -> None:
    document = json.loads(profile.read_text())
    changed = []
    for group in document["groups"]:
        for row in group["measured"]:
            for each in row["times"]:
                if each.get("delegated") == 40:
                    each.update(median_us=1.0, spread_us=[1.0, 1.0])
                    changed.append(row["bytes"])
    # A range goes from half of its row's size up to twice of it, that of 64 MiB up to all.
    for size in _in_bytes():
        within = [middle / 2 <= min(size, 64 << 20) < 2 * middle for middle in changed]
        assert any(within), (size, document)
    profile.write_text(json.dumps(document))


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    profile = tmp_path_factory.mktemp("hybrid") / "profile.json"
    known = {**EMULATED, "DEEPYTORCH_PROFILE": str(profile)}
    forced = {**known, "DEEPYTORCH_TUNE": "force"}
    spawn_ranks(_measure, WORLD_SIZE, backend=BACKEND, env=forced, fresh=True, timeout_s=120)
    _prefer_divided(profile)
    return {**known, "DEEPYTORCH_TUNE": "auto"}


def _sums(rank: int, world_size: int) -> None:
    from deepytorch_core import _core

    device = rank_gpu(rank)
    for dtype, rounding in ROUNDING.items():
        for count in COUNTS:
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                generator = torch.Generator(device=device).manual_seed(count)
                inputs = [
                    torch.randn(count, generator=generator, device=device).to(dtype)
                    for _ in range(world_size)
                ]
                expected = torch.stack([each.double() for each in inputs]).sum(0)
                if op == dist.ReduceOp.AVG:
                    expected /= world_size
                value = inputs[rank].clone()
                work = dist.all_reduce(value, op=op, async_op=count % 2 == 0)
                if work is not None:
                    work.wait()
                what = f"{op} of {count} x {dtype}"
                error = (value.double() - expected).abs().max().item()
                assert error <= rounding * expected.abs().max().item(), f"{what}: off by {error}"
                assert_same_on_all_ranks(value, what)
    divided = [row for row in _core.statistics() if "NCCL beside it with 40%" in row["reason"]]
    assert sum(row["calls"] for row in divided) == 2 * len(COUNTS) * len(ROUNDING), divided


def test_sums(env: dict[str, str]) -> None:
    spawn_ranks(_sums, WORLD_SIZE, backend=BACKEND, env=env, fresh=True, timeout_s=120)


def _killed(rank: int, world_size: int) -> tuple[str, float, float]:
    value = torch.ones(COUNTS[-1], device=rank_gpu(rank))
    dist.all_reduce(value)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    said = "no error"
    try:
        for _ in range(200):
            dist.all_reduce(value)
            time.sleep(0.05)
    except dist.DistBackendError as error:
        said = str(error)
    seconds = time.monotonic() - start
    torch.cuda.synchronize()  # NCCL's part waits for the lost rank no more
    return said, seconds, time.monotonic() - start


def test_a_killed_rank_is_named(env: dict[str, str]) -> None:
    settings: dict[str, Any] = {"backend": BACKEND, "env": env, "fresh": True, "timeout_s": 90}
    outcomes = spawn_ranks(_killed, WORLD_SIZE, expect_dead={1}, **settings)
    for rank in set(range(WORLD_SIZE)) - {1}:
        # The rank has also left its group, and its process could end.
        said, raised_s, over_s = outcomes[rank]
        assert "rank 1" in said, said
        assert raised_s < 15
        assert over_s < 30
