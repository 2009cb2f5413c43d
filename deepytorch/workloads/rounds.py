"""Compares a framework's two arms over rounds of fresh processes, which train in turns in each.

Processes that do the same differ by some percent for as long as they live. On two H100 stock DDP's
step differed by 9% between two runs. Rounds tell that from what deepytorch does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from deepytorch import workloads
from deepytorch.workloads import TrainJob
from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import ddp, launch, timing
from deepytorch_core.bench.job import MIN_BLOCKS, BenchError

# Sums of more than two ranks depend on their order, and training carries the difference on.
MAX_LOSS_DIFFERENCE = 1e-3


def compare(job: TrainJob, *, rounds: int, say: Callable[[str], None]) -> Record:
    """Train both arms in each of `rounds`; the record, with the fields `TRAIN_FIELDS`.

    `job.steps` are those of all rounds, and `job.trace` gets a folder for each, as "round1". The
    arms take turns in starting first, too. `say` is told how a round ended. Raises BenchError for
    what can't run here, WorkerError for a rank that failed.
    """
    if rounds < 1:
        raise BenchError(f"--rounds must be at least 1, not {rounds}")
    least = MIN_BLOCKS * rounds
    if job.steps < least:
        raise BenchError(f"--steps must be at least {least} in {rounds} rounds, not {job.steps}")
    job = dataclasses.replace(job, steps=math.ceil(job.steps / rounds))
    found: list[Record] = []
    for number in range(rounds):
        first = timing.OURS if number % 2 == 0 else timing.BASELINE
        trace = job.trace and f"{job.trace}/round{number + 1}"
        found += launch.run(dataclasses.replace(job, first=first, trace=trace))
        times = timing.compare(blocks_of(found[-1]))
        low, high = times.spread
        say(
            f"round {number + 1}/{rounds}  {job.baseline} {times.baseline_time_us / 1e3:.2f} ms, "
            f"deepytorch {times.time_us / 1e3:.2f} ms a step: {times.speedup:.2f}x "
            f"(quartiles {low:.2f} to {high:.2f})"
        )
    return record(job, found)


def blocks_of(found: Record) -> list[list[list[float]]]:
    """[arm][block][step] in microseconds of one round: a step takes what its slowest rank does."""
    return [_slowest(found["shares"][arm]) for arm in (timing.OURS, timing.BASELINE)]


def _slowest(shares: Sequence[dict[str, Any]]) -> list[list[float]]:
    blocks = zip(*(share["times"] for share in shares), strict=True)
    return [[max(step) for step in zip(*block, strict=True)] for block in blocks]


def record(job: TrainJob, found: Sequence[Record]) -> Record:
    """The fields `TRAIN_FIELDS` of `bench.record`, of what each round's processes measured."""
    blocks: list[list[list[float]]] = [[], []]
    calls: dict[str, int] = {}
    difference = 0.0
    for round_record in found:
        for arm, more in zip(blocks, blocks_of(round_record), strict=True):
            arm += more
        ours, baseline = round_record["shares"]
        for a, b in zip(ours, baseline, strict=True):
            difference = max(difference, ddp.loss_difference(a["losses"], b["losses"]))
        for share in ours:
            for name, count in share["calls"].items():
                calls[name] = calls.get(name, 0) + count
    comparison = timing.compare(blocks)
    ours, baseline = found[0]["shares"]
    limit = 0.0 if job.world_size == 2 else MAX_LOSS_DIFFERENCE
    return {
        "bench": "train",
        "framework": job.framework,
        "framework_version": workloads.version(job.framework),
        "parameters": job.parameters,
        "dtype": "bfloat16" if workloads.OFFLOAD in job.framework else "float32",
        "batch_size": job.batch_size,
        "world_size": job.world_size,
        "device": job.device,
        "adapter_us": round(
            max(
                share["adapter_us"]
                for round_record in found
                for share in round_record["shares"][timing.OURS]
            ),
            1,
        ),
        "native_calls": sum(calls.values()) - calls.get("delegate", 0),
        "delegated_calls": calls.get("delegate", 0),
        "steps": sum(len(block) for block in blocks[timing.OURS]),
        "num_blocks": comparison.num_blocks,
        "round_speedups": [
            round(timing.compare(blocks_of(round_record)).speedup, 3) for round_record in found
        ],
        "step_time_us": round(comparison.time_us, 1),
        "baseline": job.baseline,
        "baseline_step_time_us": round(comparison.baseline_time_us, 1),
        "speedup": round(comparison.speedup, 3),
        "speedup_spread": [round(value, 3) for value in comparison.spread],
        "loss": ddp.finite(ours[0]["losses"][-1]),
        "baseline_loss": ddp.finite(baseline[0]["losses"][-1]),
        "loss_difference": ddp.finite(difference),
        "loss_check": "exact" if difference == 0 else "statistical",
        "wrong": int(difference > limit),
        "emulated": found[0].get("emulated"),
        **{name: found[0][name] for name in ("baseline_settings", "machine", "versions", "commit")},
    }
