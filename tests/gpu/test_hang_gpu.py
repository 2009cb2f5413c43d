"""Tests of the record on GPUs, for kernels of ours and for NCCL. It knows when operations began,
which is enough to name the rank that began too few."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.base import config
from deepytorch_core.c10d import backend
from deepytorch_core.hang import collect, evidence, verdict
from deepytorch_core.testing import needs_gpus, rank_store, spawn_ranks
from deepytorch_core.testing.tensors import rank_gpu

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


def keep_away(seconds: float) -> None:
    time.sleep(seconds)


def _differ_or_stay_away(rank: int, world_size: int, said: str, count: int) -> None:
    """Rank 1 sums `count` values where the others sum 1000; 0: it doesn't come."""
    if rank == 0:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=3))
    value = torch.ones(1000, device=rank_gpu(rank))
    dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    if rank == 1 and count == 0:
        keep_away(15)
        return
    dist.all_reduce(value[:count] if rank == 1 else value, group=group)
    torch.cuda.synchronize()
    time.sleep(15)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, ("rank 1", "never entered all_reduce #2", "keep_away", "rank 1 did not come in time")),
        (16, ("ranks differ in collective #2", "16 x float32", "1000 x float32")),
    ],
)
def test_the_end_of_the_process_begins_with_the_sentence(
    tmp_path: Path, count: int, words: tuple[str, ...]
) -> None:
    said = tmp_path / "said"
    spawn_ranks(
        _differ_or_stay_away,
        2,
        str(said),
        count,
        backend="cuda:deepytorch,cpu:deepytorch",
        env={"DEEPYTORCH_COLLECTIVES": "native", "DEEPYTORCH_ERROR_HANDLING": "abort"},
        expect_dead={0} if count == 0 else {0, 1},
        fresh=True,
        timeout_s=120,
    )
    text = said.read_text()
    assert all(word in text for word in words), text
    assert text.index(words[0]) < text.index("native operation #"), text


@pytest.mark.parametrize("collectives", ["native", "stock"])
def test_the_rank_that_began_too_few_is_named(collectives: str) -> None:
    results = spawn_ranks(stay_away, 2, collectives, backend=None, timeout_s=120)
    assert results[1] == (verdict.NEVER_ENTERED, [1], 2)
