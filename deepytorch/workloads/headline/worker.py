"""One process of `bench train --workload`: a rank of one arm, from model to times.

`bench ddp` has it measure vision models, see `ddp_worker`.
"""

from __future__ import annotations

import gc
import importlib
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

import deepytorch
from deepytorch.workloads.headline import OURS
from deepytorch.workloads.headline.job import ArmJob, ArmRun
from deepytorch_core.base import config
from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import timing, worker
from deepytorch_core.compile import compilation_of
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels

# The losses of these first steps are compared: every arm takes them on the same batches.
CHECKED_STEPS = 6
# Compiling decides within 62 steps and graphs within 70 more; a tuned arm may compile for shapes.
MAX_WARMUP_STEPS = 160
# Over the batches, after that.
_MOST_REPEATS = 4


@dataclass(frozen=True)
class Trained:
    """A model with the function that trains one step on a batch of a number and gives its loss.

    `units` are tokens or images of this rank's batches, in order; `parameters` of the whole model.
    """

    model: nn.Module
    train: Callable[[int], torch.Tensor]
    units: Sequence[int]
    parameters: int


def measure(job: ArmRun, rank: int, store: Store, emit: worker.Emit) -> None:
    """Trains the arm; rank 0 gives what all ranks measured to `emit`."""
    device = worker.device_of(job, rank)
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        store=PrefixStore("training", store),
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s),
    )
    builder: Any = importlib.import_module(f"deepytorch.workloads.headline.{job.row.builder}")
    begin = time.perf_counter()
    trained: Trained = builder.build(job, device)
    if job.device == "cuda":  # weights are made in float32 first: that is not training's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    losses = [trained.train(number) for number in range(CHECKED_STEPS)]
    done, counted = CHECKED_STEPS, CHECKED_STEPS
    if not job.row.offload:  # a step takes seconds there, and no arm compiles
        while not _is_settled(trained.model) and counted < MAX_WARMUP_STEPS:
            counted += not _is_waiting(trained.model)
            trained.train(done)
            done += 1
        done += _meet_all_shapes(job, trained, device)
    warmup_s = time.perf_counter() - begin
    warmup_memory_gb = memory_gb(device)
    if job.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    # Neither Python's garbage of the warm-up nor what the allocator has to get back is a step's.
    gc.collect()
    trained.train(0)
    dist.barrier()
    clock = worker.cuda_clock if job.device == "cuda" else timing.wall_clock
    numbers = iter(range(job.steps))
    before = worker.calls_by_algorithm(job.ours, "all_reduce")
    times = clock(lambda: trained.train(next(numbers)), job.steps)
    units = [trained.units[number % len(trained.units)] for number in range(job.steps)]
    share = {
        "times_us": times,
        "units": sum(units),
        "losses": [float(loss) for loss in losses],
        "memory_gb": memory_gb(device),
        "warmup_memory_gb": warmup_memory_gb,
        "warmup_s": warmup_s,
    }
    if shares := gather(job, rank, store, share):
        after = worker.calls_by_algorithm(job.ours, "all_reduce")
        found = {
            "algorithm": worker.main_algorithm(before, after),
            "registered": job.arm.startswith(OURS) and _registers_buckets(device),
        }
        emit({"record": {**record(job, trained, done, shares), **found}})
    dist.barrier()


def gather(job: ArmRun, rank: int, store: Store, share: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's `share` on rank 0, in order; [] on the others. Once in a process."""
    store.set(f"share/{rank}", json.dumps(share))
    if rank != 0:
        return []
    keys = [f"share/{peer}" for peer in range(job.world_size)]
    store.wait(keys, timedelta(seconds=job.timeout_s))
    return [json.loads(value) for value in store.multi_get(keys)]


def swap_kernels(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    autocast: bool,
) -> None:
    """Fused kernels and optimizers where they are measured faster; option `kernels` decides."""
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    setting = KernelSetting(
        model=model, optimizers=optimizers, device=device, autocast=dtype if autocast else None
    )
    apply_kernels(setting, config.current().kernels)


def _registers_buckets(device: torch.device) -> bool:
    """Whether `import deepytorch` puts the buckets of DDP modules into registered memory here."""
    if device.type != "cpu":
        return config.current().collectives == "native"
    group = dist.group.WORLD
    return group is not None and bool(group._get_backend(device).supports_tensor_alloc(device))


def _is_waiting(model: nn.Module) -> bool:
    compilation = compilation_of(model)
    return compilation is not None and compilation.is_waiting


def _meet_all_shapes(job: ArmRun, trained: Trained, device: torch.device) -> int:
    """Train on each batch again until no rank makes new code for one; returns the steps."""
    compiles = job.arm.startswith("tuned") or compilation_of(trained.model) is not None
    for repeat in range(_MOST_REPEATS if compiles else 1):
        before = _num_made(trained.model)
        for number in range(len(trained.units)):
            trained.train(number)
        is_new = torch.tensor([float(_num_made(trained.model) != before)], device=device)
        dist.all_reduce(is_new, op=dist.ReduceOp.MAX)
        if repeat and not is_new.item():
            break
    return (repeat + 1) * len(trained.units)


def _num_made(model: nn.Module) -> int:
    compilation = compilation_of(model)
    return 0 if compilation is None else compilation.num_made


def _is_settled(model: nn.Module) -> bool:
    compilation = compilation_of(model)
    return compilation is None or compilation.is_settled


def memory_gb(device: torch.device) -> float:
    """At most taken so far; of a GPU what torch holds, as graphs' memory is never free."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def record(
    job: ArmRun, trained: Trained, warmup_steps: int, shares: list[dict[str, Any]]
) -> Record:
    """Return what an arm measured, over ranks: "times_us", "units", "losses", and the rest."""
    report = deepytorch.report()
    steps = zip(*(share["times_us"] for share in shares), strict=True)
    curves = zip(*(share["losses"] for share in shares), strict=True)
    return {
        "arm": job.arm,
        # A step takes as long as on its slowest rank.
        "step_time_us": [round(max(step), 1) for step in steps],
        "units": sum(share["units"] for share in shares),
        "losses": [sum(losses) / len(losses) for losses in curves],
        "peak_memory_gb": round(max(share["memory_gb"] for share in shares), 3),
        "warmup_memory_gb": round(max(share["warmup_memory_gb"] for share in shares), 3),
        "warmup_s": round(max(share["warmup_s"] for share in shares), 1),
        "warmup_steps": warmup_steps,
        "parameters": trained.parameters,
        "native_calls": report.native_calls,
        "delegated_calls": report.delegated_calls,
        "decisions": [str(decision) for decision in report.decisions],
        "choices": {
            decision["what"]: decision["chosen"]
            for decision in report.decisions
            if "what" in decision
        },
    }


if __name__ == "__main__":
    worker.leave(worker.serve(sys.argv[1:], ArmJob, measure))
