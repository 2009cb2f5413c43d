"""A rank has a context on its own GPU alone, also after a fault: others pay for those there."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import needs_gpus, spawn_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(2)]


def _lose_rank_0(rank: int, world_size: int, how: str) -> list[bool]:
    """Whether there is a context on GPU 0: before the fault, after the error, after the group."""
    torch.cuda.set_device(rank)
    value = torch.ones(1 << 18, device="cuda")
    for _ in range(3):
        dist.all_reduce(value)
    torch.cuda.synchronize()
    dist.barrier()
    seen = [torch._C._cuda_hasPrimaryContext(0)]
    if rank == 0:
        if how == "dies":
            os._exit(1)
        dist.destroy_process_group()
        os._exit(0)

    def go_on() -> None:
        for _ in range(1000):
            dist.all_reduce(value)
            torch.cuda.synchronize()

    with pytest.raises(dist.DistBackendError, match="rank 0"):
        go_on()
    seen.append(torch._C._cuda_hasPrimaryContext(0))
    dist.destroy_process_group()
    time.sleep(3.0)
    return [*seen, torch._C._cuda_hasPrimaryContext(0)]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("peers", ["reached", "not reached"])
@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_a_lost_rank_0_leaves_no_context_on_its_gpu(how: str, peers: str) -> None:
    env = {"DEEPYTORCH_COLLECTIVES": "native", "DEEPYTORCH_ERROR_HANDLING": "raise"}
    env["DEEPYTORCH_TUNE"] = "off"
    if peers == "not reached":
        env["NCCL_P2P_DISABLE"] = "1"
    told = spawn_ranks(
        _lose_rank_0,
        2,
        how,
        backend="deepytorch",
        env=env,
        expect_exit={0},
        fresh=True,
        timeout_s=100.0,
    )
    assert told[1] == [False, False, False]
