"""A barrier runs on the GPU that its group has, also where NCCL has not been used there yet."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.base import config
from deepytorch_core.c10d import activation
from deepytorch_core.testing import needs_gpus, rank_store, spawn_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(1)]


def _barrier(rank: int, world_size: int, *, bound: bool) -> tuple[str, list[int], list[float]]:
    """Return what NCCL's backend says, bytes taken on each GPU but the rank's own, and the sum."""
    if torch.cuda.device_count() < world_size:
        config.set_where_unset({"NCCL_HOSTID": f"node-{rank}"})  # NCCL refuses to share a GPU
        device = torch.device("cuda", 0)
    else:
        device = torch.device("cuda", world_size - 1 - rank)  # not the one that NCCL guesses
    torch.cuda.set_device(device)
    activation.activate()
    dist.init_process_group(
        "nccl",  # for GPUs alone: with one for CPUs beside it that would serve barriers
        store=rank_store("world"),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=50),
        device_id=device if bound else None,
    )
    value = torch.full((1000,), float(rank), device=device)
    with tempfile.TemporaryFile() as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            if not bound:
                dist.all_reduce(value)
            dist.barrier()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        said.seek(0)
        text = said.read().decode(errors="replace")
    if bound:
        dist.all_reduce(value)
    others = [each for each in range(torch.cuda.device_count()) if each != device.index]
    return text, [torch.cuda.max_memory_reserved(each) for each in others], value[:2].tolist()


@pytest.mark.parametrize("bound", [False, True])
def test_barrier_is_on_the_groups_gpu(bound: bool) -> None:
    """With a device_id before any other operation, without one after a native one."""
    for text, taken, value in spawn_ranks(_barrier, 2, bound=bound, fresh=True):
        assert "Guessing device" not in text
        assert not any(taken)
        assert value == [1.0, 1.0]
