"""Of operations on GPUs the record knows when they began: enough to name the rank that began too
few, whether a kernel of ours or NCCL carries them out."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from deepytorch_core import backend, config
from deepytorch_core.hang import collect, evidence, verdict
from deepytorch_core.testing import needs_gpus, rank_store, spawn_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(2)]


def stay_away(rank: int, world_size: int, collectives: str) -> tuple[str, list[int], int] | None:
    """Rank 1 looks at the job before it does its part; the others have begun theirs."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    config.set_current(config.Options(collectives=collectives))
    backend.register()
    dist.init_process_group(
        "cuda:deepytorch", store=rank_store(collectives), rank=rank, world_size=world_size
    )
    begun = rank_store(f"begun/{collectives}")
    value = torch.ones(1000, device=device)
    dist.all_reduce(value)
    torch.cuda.synchronize()
    found = None
    if rank == 1:
        begun.wait([str(other) for other in range(world_size) if other != 1])
        (job,) = collect.jobs([os.getpid()])
        ranks = collect.ranks(job.records)
        others = [
            operation
            for each in ranks
            for operation in each.operations
            if not operation.on_device or operation.state != evidence.ISSUED
        ]
        assert not others, others
        judged = verdict.judge(ranks)
        found = (judged.kind, list(judged.ranks), judged.sequence)
    for _ in range(3):
        dist.all_reduce(value)
    begun.set(str(rank), "")
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("collectives", ["native", "stock"])
def test_the_rank_that_began_too_few_is_named(collectives: str) -> None:
    results = spawn_ranks(stay_away, 2, collectives, backend=None, timeout_s=120)
    assert results[1] == (verdict.NEVER_ENTERED, [1], 2)
