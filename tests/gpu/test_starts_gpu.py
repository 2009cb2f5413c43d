"""Tests of the rank that begins collectives of GPUs last, and of its line: our kernels, NCCL."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import deepytorch
from deepytorch_core.hang import record
from deepytorch_core.hang.starts import Starts
from deepytorch_core.testing import needs_gpus, spawn_ranks
from deepytorch_core.testing.tensors import rank_gpu

pytestmark = [pytest.mark.gpu, needs_gpus(2)]

LATE, LAG_S, CALLS = 1, 0.02, 25


def step(value: torch.Tensor) -> None:
    dist.all_reduce(value)
    torch.cuda.synchronize()


def come_late(rank: int, world_size: int) -> tuple[tuple[Starts, ...], list[str]]:
    value = torch.ones(1000, device=rank_gpu(rank))
    step(value)  # NCCL sets up its connections
    for _ in range(CALLS):
        time.sleep(LAG_S * (rank == LATE))
        step(value)
    dist.barrier()
    torch.cuda.synchronize()
    found = deepytorch.report().starts
    dist.barrier()  # a rank that has ended has no record
    torch.cuda.synchronize()
    operations = record.read(os.getpid()).operations
    called = {
        f"{os.path.basename(operation.at.file)} {operation.at.function}"
        for operation in operations
        if operation.op == "all_reduce" and operation.on_device and operation.at
    }
    return found, sorted(called)


@pytest.mark.parametrize("collectives", ["native", "stock"])
def test_who_comes_late_is_named_with_the_line_that_called(collectives: str) -> None:
    environment = {"DEEPYTORCH_COLLECTIVES": collectives}
    for found, called in spawn_ranks(come_late, 2, backend="deepytorch", env=environment):
        (world,) = found
        assert world.latest == LATE
        assert world.times_last >= CALLS - 2
        assert world.lag_us > LAG_S * 1e6 / 2
        assert called == [f"{os.path.basename(__file__)} step"]
