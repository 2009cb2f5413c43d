"""One process of `bench train`: a rank of one arm. Started by `launch.run`; see `bench.worker`.

The two arms are processes of their own, so stock is stock and ours is what a user gets. They are
alive at the same time and train in turns, block by block, so what the machine does meanwhile hits
both alike; who waits for its turn sleeps. The first half of the processes is ours.
"""

from __future__ import annotations

import cProfile
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import CodeType

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

import deepytorch
from deepytorch import integrations, workloads
from deepytorch.workloads import TrainJob
from deepytorch_core.bench import ddp, timing, worker
from deepytorch_core.bench.turns import Turns

# Untimed steps: optimizers make their state in the first, frameworks settle in the next ones.
WARMUP_STEPS = 4
PROFILED_STEPS = 5


def measure(job: TrainJob, process: int, store: Store, emit: worker.Emit) -> None:
    """Trains one arm on this process in its turns; rank 0 of ours gives what all found to `emit`.

    That is "shares": [arm][rank] the times ([block][step], microseconds), losses, calls by
    algorithm and `adapter_us` of each process; `rounds.record` makes a record of it.
    """
    arm, rank = divmod(process, job.world_size)
    _stay_on_cores(rank, job.world_size)
    turns = Turns(store, job)
    device = worker.device_of(job, rank)
    clock = worker.cuda_clock if job.device == "cuda" else timing.wall_clock
    # One arm after the other: both at once would share the cores.
    if arm != job.first:
        turns.wait(f"warm-up {job.first}")
    step = workloads.load(job.framework).build(job, device, ours=arm == timing.OURS)
    losses: list[torch.Tensor] = []

    def train() -> None:
        losses.append(step())

    for _ in range(WARMUP_STEPS):
        train()
    before = _calls()
    turns.finished(f"warm-up {arm}")
    turns.wait(f"warm-up {1 - job.first}")
    plan = ddp.schedule(job.steps)
    times: list[list[float]] = []
    for number, owner in enumerate(timing.block_order(plan.num_pairs)):
        if owner == arm:
            train()  # untimed: absorbs the change of turns
            times.append(clock(train, plan.repetitions[arm]))
            turns.finished(str(number))
        turns.wait(str(number))
    calls = {name: n - before.get(name, 0) for name, n in _calls().items()}
    if not any(calls.values()):
        calls = before  # a replayed graph makes none: what was captured then
    adapter_us = _adapter_us(train)
    if job.trace:
        for owner in (timing.OURS, timing.BASELINE):
            if owner == arm:
                _write_trace(train, Path(job.trace) / f"{job.arm_name(arm)}-rank{rank}.json")
                turns.finished(f"trace {arm}")
            turns.wait(f"trace {owner}")
    share = {
        "times": times,
        "adapter_us": adapter_us,
        "losses": [float(loss) for loss in losses],
        "calls": calls,
    }
    store.set(f"share/{arm}/{rank}", json.dumps(share))
    if process == 0:
        keys = [f"share/{a}/{r}" for a in (0, 1) for r in range(job.world_size)]
        store.wait(keys, timedelta(seconds=job.timeout_s))
        shares = [json.loads(value) for value in store.multi_get(keys)]
        arms = [shares[: job.world_size], shares[job.world_size :]]
        emit({"record": {"shares": arms}})


def _stay_on_cores(rank: int, world_size: int) -> None:
    """Keep to the rank's share of this machine's cores, the same in both arms.

    Steps of small models are as long as their Python. The cores on which a process happens to run,
    near its GPU or not, would make a larger difference than the arms do.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // world_size
    if share >= 2:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


def _adapter_us(train: timing.Call) -> float:
    """Microseconds that the adapters' own Python takes in a step of this thread.

    Own: without what it calls, such as the collectives. The profiler adds to each call, so it is
    an upper bound. Backward hooks of models on GPUs run in other threads and are not seen.
    """
    folder = str(Path(integrations.__file__).parent)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(PROFILED_STEPS):
        train()
    profile.disable()
    own_s = sum(
        entry.inlinetime
        for entry in profile.getstats()
        if isinstance(entry.code, CodeType) and entry.code.co_filename.startswith(folder)
    )
    return own_s * 1e6 / PROFILED_STEPS


def _write_trace(train: timing.Call, file: Path) -> None:
    """Trace this process and its GPU in some steps, for Perfetto or chrome://tracing."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    train()  # absorbs the change of turns
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(PROFILED_STEPS):
            train()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(file))


def _calls() -> dict[str, int]:
    """Calls so far by the algorithm that served them."""
    calls: dict[str, int] = {}
    for row in deepytorch.report().rows:
        calls[row.algorithm] = calls.get(row.algorithm, 0) + row.calls
    return calls


if __name__ == "__main__":
    worker.leave(worker.serve(sys.argv[1:], TrainJob, measure))
