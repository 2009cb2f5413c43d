"""One process of `bench train --workload W --together`: a rank of plain and of ours' collectives.

Processes that do the same differ by some percent for as long as they live. That is more than
collectives change a step that the host limits. Here both arms share the process, and run the same
code on two models. One model is on a group of the baseline's and one on deepytorch's. They take
turns, block by block.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

import deepytorch
from deepytorch.workloads import headline
from deepytorch.workloads.headline.job import TogetherJob
from deepytorch.workloads.headline.worker import CHECKED_STEPS, Trained, gather, memory_gb, record
from deepytorch_core.bench import ddp, timing, worker

ARMS = (headline.COLLECTIVES, headline.PLAIN)
"""In the order of `timing.OURS` and `timing.BASELINE`."""


class _Arm:
    """A model on its group; each call trains it on the next batch."""

    def __init__(self, job: TogetherJob, device: torch.device, group: dist.ProcessGroup) -> None:
        builder: Any = importlib.import_module(f"deepytorch.workloads.headline.{job.row.builder}")
        self.trained: Trained = builder.build(job, device, group)
        self.done = 0

    def __call__(self) -> torch.Tensor:
        self.done += 1
        return self.trained.train(self.done - 1)


def measure(job: TogetherJob, rank: int, store: Store, emit: worker.Emit) -> None:
    """Trains both arms; rank 0 gives a record of each to `emit`, as `worker.measure` makes it."""
    deepytorch.deactivate()  # each arm says which group it is on
    groups = worker.Groups(job, rank, store)
    begin = time.perf_counter()
    with ddp.as_users_get_it(ddp.has_registered_buckets(job, groups)):
        ours = _Arm(job, groups.device, groups.ours)
    arms = (ours, _Arm(job, groups.device, groups.baseline))
    losses: list[list[torch.Tensor]] = [[], []]
    for _ in range(CHECKED_STEPS):
        for arm, curve in zip(arms, losses, strict=True):
            curve.append(arm())
    for _ in ours.trained.units:
        for arm in arms:
            arm()
    warmup_s = time.perf_counter() - begin
    warmup_memory_gb = memory_gb(groups.device)
    first = ours.done
    plan = ddp.schedule(job.steps)
    repetitions = plan.repetitions[timing.OURS]
    blocks = timing.follow(plan, arms, clock=groups.clock, ranks=groups.ranks)
    # Each block begins with an untimed step.
    timed = [step for step in range(ours.done - first) if step % (repetitions + 1)]
    units = [ours.trained.units[(first + step) % len(ours.trained.units)] for step in timed]
    share = {
        "units": sum(units),
        "memory_gb": memory_gb(groups.device),
        "warmup_memory_gb": warmup_memory_gb,
        "warmup_s": warmup_s,
        "losses": [[float(loss) for loss in curve] for curve in losses],
    }
    if not (shares := gather(job, rank, store, share)):
        return
    for index, name in enumerate(ARMS):
        times = [step_us for block in blocks[index] for step_us in block]
        of_arm = [
            {**rank_share, "losses": rank_share["losses"][index], "times_us": times}
            for rank_share in shares
        ]
        found = record(job, arms[index].trained, first, of_arm)
        if name == headline.PLAIN:  # what is counted is ours'
            found |= {"native_calls": 0, "delegated_calls": 0, "decisions": [], "choices": {}}
        emit({"record": {**found, "arm": name}})


if __name__ == "__main__":
    worker.leave(worker.serve(sys.argv[1:], TogetherJob, measure))
