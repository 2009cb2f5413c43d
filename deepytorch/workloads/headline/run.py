"""Lets a workload's arms take turns in rounds of fresh processes, and compares them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from deepytorch.workloads import headline
from deepytorch.workloads.headline.job import ArmJob, ArmRun, TogetherJob, layers_that_fit
from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import launch, pairs
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.record import claimed, describe_emulated, describe_rate

# Different kernels round differently, and so do sums in another order; training in bf16 or fp16
# carries it on. A wrong gradient shows as whole percents within the checked steps.
LARGEST_LOSS_DIFFERENCE = 2e-2

Say = Callable[[str], None]


def compare(job: ArmJob, *, rounds: int, split: bool, say: Say, only: Sequence[str] = ()) -> Record:
    """Train every arm `rounds` times, forwards and backwards in turn; the record of the row.

    `say` is told what happens. Raises BenchError for what can't run here, WorkerError for a rank
    that failed.
    """
    row = job.row
    job = _fitted(job, say)
    arms = only or headline.arms_of(row, split=split)
    unknown = set(arms) - set(headline.arms_of(row, split=True))
    if unknown:
        known = ", ".join(headline.arms_of(row, split=True))
        raise BenchError(f"{row.name} has no arm {', '.join(sorted(unknown))}; it has {known}")
    return _record(job, take_turns(job, arms, rounds, say), rounds)


def compare_together(job: TogetherJob, *, rounds: int, say: Say) -> Record:
    """Train plain and ours' collectives in the same processes, `rounds` times; the row's record.

    `say` is told what happens. Raises BenchError for what can't run here, WorkerError for a rank
    that failed.
    """
    _check_rounds(rounds)
    samples: dict[str, list[Record]] = {headline.PLAIN: [], headline.COLLECTIVES: []}
    with launch.scratch_folder() as folder:
        for number in range(rounds):
            for found in launch.run(dataclasses.replace(job, scratch=folder)):
                samples[found["arm"]].append(found)
                _say_step(say, f"round {number + 1}/{rounds}", found)
    steps = len(samples[headline.PLAIN][0]["step_time_us"])
    return {**_record(dataclasses.replace(job, steps=steps), samples, rounds), "together": True}


def take_turns(job: ArmRun, arms: Sequence[str], rounds: int, say: Say) -> dict[str, list[Record]]:
    """Measure each arm in each round: first one after the other, then backwards, and so on.

    Raises BenchError for what can't run here, WorkerError for a rank that failed.
    """
    _check_rounds(rounds)
    samples: dict[str, list[Record]] = {arm: [] for arm in arms}
    with launch.scratch_folder() as folder:
        for number in range(rounds):
            for arm in arms if number % 2 == 0 else tuple(reversed(arms)):
                (found,) = launch.run(dataclasses.replace(job, arm=arm, scratch=folder))
                samples[arm].append(found)
                _say_step(say, f"round {number + 1}/{rounds}", found)
    return samples


def _check_rounds(rounds: int) -> None:
    if rounds < 1:
        raise BenchError(f"--rounds must be at least 1, not {rounds}")


def _say_step(say: Say, when: str, found: Record) -> None:
    median = statistics.median(found["step_time_us"]) / 1e3
    say(f"{when}  {found['arm']:<28} {median:10.2f} ms a step")


def _fitted(job: ArmJob, say: Say) -> ArmJob:
    """The job with as many layers as the machine's GPUs hold."""
    if job.scale != "full" or job.device != "cuda" or job.layers:
        return job
    import torch

    if not torch.cuda.is_available():
        raise BenchError(
            f"{job.workload} at full scale needs GPUs and torch sees none here: use --scale tiny"
        )
    all_layers = job.row.full.get("layers", 0)
    if not all_layers:
        return job
    memory = torch.cuda.get_device_properties(0).total_memory
    layers = layers_that_fit(job.row, job.micro_batch, job.world_size, memory)
    if layers < all_layers:
        say(f"{layers} of {all_layers} layers: more do not fit in {memory / 1e9:.0f} GB")
    return dataclasses.replace(job, layers=layers)


def _record(job: ArmJob, samples: dict[str, list[Record]], rounds: int) -> Record:
    """The fields `WORKLOAD_FIELDS` of `bench.record`."""
    arms = {arm: _arm(found) for arm, found in samples.items()}
    tuned = [arm for arm in arms if arm.startswith("tuned")]
    best = min(tuned, key=lambda arm: float(arms[arm]["step_time_us"]), default=None)
    shape, row = job.shape, job.row
    any_arm = next(iter(samples.values()))[0]
    difference = loss_difference(arms)
    return {
        "bench": "workload",
        "workload": job.workload,
        "title": row.title,
        "scale": job.scale,
        "world_size": job.world_size,
        "device": job.device,
        "micro_batch": job.micro_batch,
        "precision": row.precision,
        "zero_stage": row.zero_stage,
        "lengths": row.lengths,
        "shape": dict(shape),
        "layers": shape.get("layers"),
        "all_layers": shape.get("all_layers", row.shape(job.scale).get("layers")),
        "parameters": any_arm["parameters"],
        "unit": row.unit,
        "rounds": rounds,
        "steps": job.steps,
        "arms": arms,
        "tuned": best,
        "against_plain": ratio(samples, headline.PLAIN, headline.OURS),
        "against_tuned": ratio(samples, best, headline.OURS),
        "collectives_only": ratio(samples, headline.PLAIN, headline.COLLECTIVES),
        "compute_only": ratio(samples, headline.PLAIN, headline.COMPUTE),
        "claim": row.claim if job.scale == "full" else None,
        "loss_difference": difference,
        "loss_check": "dropout_off",
        "wrong": int(difference is None or difference > LARGEST_LOSS_DIFFERENCE),
        **_ours_and_stock(row, arms, ratio(samples, headline.PLAIN, headline.OURS)),
        "emulated": any_arm.get("emulated"),
        **{name: any_arm[name] for name in ("machine", "versions", "commit")},
    }


def _ours_and_stock(
    row: headline.WorkloadRow, arms: dict[str, dict[str, Any]], speedup: Sequence[float] | None
) -> dict[str, Any]:
    """Plain and ours alone, under the names that records of other benchmarks have for them."""
    plain, ours = arms.get(headline.PLAIN), arms.get(headline.OURS)
    both = {"plain": plain, "ours": ours} if plain and ours else None
    framework = "FSDP2" if row.fsdp2 else "DistributedDataParallel"
    if row.zero_stage:
        framework = f"DeepSpeed ZeRO-{row.zero_stage}"
    return {
        "engine": "deepytorch",
        "stock": f"{framework}, {row.precision}, its own example unchanged",
        "stock_per_s": plain and plain["units_per_s"],
        "ours_per_s": ours and ours["units_per_s"],
        "speedup": speedup and speedup[0],
        "speedup_spread": speedup and list(speedup[1:]),
        "loss_max_diff": both and loss_difference(both),
        "stock_peak_gib": plain and _gib(plain["peak_memory_gb"]),
        "ours_peak_gib": ours and _gib(ours["peak_memory_gb"]),
    }


def _gib(gigabytes: float) -> float:
    return round(gigabytes * 1e9 / 2**30, 3)


def _arm(found: Sequence[Record]) -> dict[str, Any]:
    times = [time for record in found for time in record["step_time_us"]]
    units = sum(record["units"] for record in found)
    return {
        "step_time_us": round(statistics.median(times), 1),
        "samples_us": [record["step_time_us"] for record in found],
        "units_per_s": round(units / (sum(times) / 1e6), 1),
        "peak_memory_gb": max(record["peak_memory_gb"] for record in found),
        "warmup_memory_gb": max(record["warmup_memory_gb"] for record in found),
        "warmup_s": max(record["warmup_s"] for record in found),
        "warmup_steps": max(record["warmup_steps"] for record in found),
        # JSON has no word for what is no number.
        "losses": [loss if math.isfinite(loss) else None for loss in found[0]["losses"]],
        "native_calls": found[0]["native_calls"],
        "delegated_calls": found[0]["delegated_calls"],
        "decisions": found[0]["decisions"],
    }


def ratio(samples: dict[str, list[Record]], slow: str | None, fast: str) -> Any:
    """[speed-up, low, high]: median and quartiles over the steps of all rounds, in pairs.

    None without both arms.
    """
    if slow not in samples or fast not in samples:
        return None
    stock, ours = ([found["step_time_us"] for found in samples[arm]] for arm in (slow, fast))
    return [round(value, 3) for value in pairs.speedup(stock, ours)]


def loss_difference(arms: dict[str, dict[str, Any]]) -> float | None:
    """The largest relative difference between the arms' first losses; None if one is no number."""
    curves = [arm["losses"] for arm in arms.values()]
    worst = 0.0
    for losses in zip(*curves, strict=True):
        if None in losses:
            return None
        worst = max(worst, (max(losses) - min(losses)) / abs(min(losses)))
    return round(worst, 6)


def lines(record: Record) -> list[str]:
    """Return what the command prints of a record."""
    layers = ""
    if record["layers"] and record["layers"] != record["all_layers"]:
        layers = f", {record['layers']} of {record['all_layers']} layers"
    found = [
        f"{record['title']} ({record['scale']}): {record['world_size']} ranks on "
        f"{record['device']}, {record['parameters'] / 1e6:.1f} M parameters{layers}, "
        f"{record['rounds']} rounds of {record['steps']} steps"
    ]
    if record.get("together"):
        found.append("both arms in each process: memory is that of both")
    if record["emulated"]:
        found.append(f"emulated: {describe_emulated(record['emulated'])}")
    for name, arm in record["arms"].items():
        found.append(
            f"{name:<28} {arm['step_time_us'] / 1e3:10.2f} ms a step "
            f"{describe_rate(record, name):>20} {arm['peak_memory_gb']:8.2f} GB, "
            f"warm-up {arm['warmup_s']:.0f} s and {arm['warmup_memory_gb']:.2f} GB"
        )
    claim = f"; claimed for the modelled product {record['claim']}x" if record["claim"] else ""
    for label, key, more in (
        ("against plain", "against_plain", claim),
        (f"against {record['tuned']}", "against_tuned", ""),
        ("collectives only", "collectives_only", ""),
        ("compute only", "compute_only", ""),
    ):
        if record[key] is not None:
            speedup, low, high = record[key]
            text = f"{speedup:.3f}x (quartiles {low:.3f} to {high:.3f}){more}"
            found.append(f"{label:<28} {claimed(record, text)}")
    difference = record["loss_difference"]
    if difference is None:
        found += [
            f"{name}: a loss is not a number: {arm['losses']}"
            for name, arm in record["arms"].items()
            if None in arm["losses"]
        ]
    else:
        found.append(f"losses differ by at most {difference:.2%}, dropout off")
    return found
