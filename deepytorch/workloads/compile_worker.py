"""One process of `bench compile`: one arm of one workload. Started by `launch.run`.

Three arms, each a process of its own: ours, eager, and torch.compile as it comes. They warm up one
after the other, each from an empty cache on disk, then train in turns, block by block. Benchmarks
of several workloads may run side by side: they share the time of warming up, and none is timed
meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from deepytorch.workloads import compile_suite
from deepytorch_core import guard
from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import quiet, timing, worker
from deepytorch_core.bench.ddp import finite
from deepytorch_core.bench.job import BenchError, Run

if TYPE_CHECKING:  # the other arms import nothing of ours' engine
    from deepytorch_core.compile.phases import Spent

OURS, EAGER, PLAIN = range(3)
ARMS = ("ours", "eager", "torch.compile")

WARMUP_STEPS = 5
# Ours ends measuring sooner or later; see deepytorch_core.compile.compilation.
MOST_WARMUP_STEPS = 160
LOSS_STEPS = 5
STEPS_PER_BLOCK = 4
# A phase of so many waits for the GPU as its steps do: fewer may all have been queued at once.
STEPS_OF_LONG_PHASE = 100
SEED = 20
LEARNING_RATE = 1e-2
# Rounding of the losses of a few steps.
MAX_LOSS_DIFFERENCE = {"float32": 1e-3, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class CompileJob(Run):
    """`bench compile` of one workload; `blocks` of each arm are timed."""

    WORKER: ClassVar[str] = "deepytorch.workloads.compile_worker"

    workload: str = "transformers/llama"
    blocks: int = 7
    policy: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.world_size != 1:
            raise BenchError(f"bench compile is for one rank, not {self.world_size}")
        if self.blocks < 1:
            raise BenchError(f"--blocks must be at least 1, not {self.blocks}")

    @property
    def num_processes(self) -> int:
        return len(ARMS)

    def environment(self, process: int, store_ports: Sequence[int]) -> dict[str, str]:
        """Decisions of earlier runs don't count."""
        own = {"DEEPYTORCH_TUNE": "force"} if process == OURS else {"DEEPYTORCH_ENABLED": "0"}
        return {**self.caches(ARMS[process]), **own}


class CompileArm:
    """The model under training in one way."""

    def __init__(self, job: CompileJob, arm: int, device: torch.device) -> None:
        torch.manual_seed(SEED)
        self.workload = compile_suite.build(job.workload, job.device)
        self.device = device
        self.model = self.workload.model.to(device).train()
        self._first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._autocast = job.device == "cuda"
        self._run: torch.nn.Module = self.model
        if arm == PLAIN:
            self._run = torch.compile(self.model)  # type: ignore[assignment]
        elif arm == OURS:
            import deepytorch

            self._run = deepytorch.compile(self.model, job.policy, is_patient=False)
        self.restart()

    def restart(self) -> None:
        """The weights, the batches and the random numbers of the start."""
        self.model.load_state_dict(self._first)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self._generator = torch.Generator().manual_seed(SEED)
        torch.manual_seed(SEED)

    def step(self) -> torch.Tensor:
        batch = self.workload.batch(self._generator)
        batch = {name: value.to(self.device) for name, value in batch.items()}
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast):
            loss = self.workload.loss(self._run, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def measure(job: CompileJob, process: int, store: Store, emit: worker.Emit) -> None:
    """Warms up, compares losses and times one arm; the first process gives the record to `emit`."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    limit = timedelta(seconds=job.timeout_s)
    device = torch.device(job.device)

    def wait(turn: str) -> None:
        store.wait([turn], limit)

    share: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        # The first process stands for all three in the line of benchmarks.
        line = stack.enter_context(quiet.turns()) if process == OURS else None
        if line is not None:
            line.warm_up()
        else:  # one after the other: compilers use every core
            wait(f"warm {process - 1}")
        arm = CompileArm(job, process, device)
        share.update(_warm_up(job, arm, process))
        arm.restart()
        share["losses"] = [finite(float(arm.step())) for _ in range(LOSS_STEPS)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        store.set(f"warm {process}", _said(job, process, share))
        for number in range(len(ARMS)):
            wait(f"warm {number}")
            if process == OURS:  # it can be minutes until the record
                sys.stderr.write(store.get(f"warm {number}").decode())
                sys.stderr.flush()
        if line is not None:
            line.time()
            store.set("alone", "1")
        wait("alone")
        share["times"] = _in_turns(job, arm, process, store)
    share["peak_gib"] = _peak_gib(device)
    share["samples"] = arm.workload.samples
    share["parameters"] = sum(parameter.numel() for parameter in arm.model.parameters())
    store.set(f"share {process}", json.dumps(share))
    if process == OURS:
        keys = [f"share {number}" for number in range(len(ARMS))]
        store.wait(keys, limit)
        emit({"record": record_of(job, [json.loads(value) for value in store.multi_get(keys)])})
    wait(f"share {OURS}")


def _in_turns(job: CompileJob, arm: CompileArm, process: int, store: Store) -> list[float]:
    """Seconds of a step in each block of this arm; the arms alternate."""
    blocks = []
    turn = 0
    for number in range(job.blocks):
        order = range(len(ARMS)) if number % 2 == 0 else reversed(range(len(ARMS)))
        for owner in order:
            if owner == process:
                arm.step()  # untimed: absorbs the change of turns
                blocks.append(_timed(arm.step, arm.device))
                store.set(f"turn {turn}", "1")
            store.wait([f"turn {turn}"], timedelta(seconds=job.timeout_s))
            turn += 1
    return blocks


def _warm_up(job: CompileJob, arm: CompileArm, process: int) -> dict[str, Any]:
    """Steps until the arm runs as it will; seconds beyond what the steps take by themselves."""
    began = time.perf_counter()
    found = None
    if process == OURS:
        from deepytorch_core import compile as engine

        found = engine.compilation_of(arm.model)
    number = counted = 0
    while number < WARMUP_STEPS or (
        found is not None and not found.is_settled and counted < MOST_WARMUP_STEPS
    ):
        counted += found is None or not found.is_waiting
        arm.step()
        number += 1
    guard.synchronize(arm.device)
    taken = time.perf_counter() - began
    spent = found.phases.spent if found is not None else {}
    steady = _steady([_timed(arm.step, arm.device) for _ in range(2)], spent)
    phases: dict[str, float] = {}
    made: list[dict[str, Any]] = []
    if found is not None:
        from deepytorch_core.base import decisions

        made = [dict(decision) for decision in decisions.made()]
        phases = {
            name: round(phase.seconds - phase.steps * steady, 2) for name, phase in spent.items()
        }
    return {
        "warmup_s": max(0.0, taken - number * steady),
        "warmup_phases_s": phases,
        "warmup_steps": number,
        "decisions": made,
    }


def _steady(blocks: list[float], spent: dict[str, Spent]) -> float:
    """Seconds of a step by itself: of the fastest block, or of a long phase that was faster still.

    Thousands of steps pass while helpers compile; what a block of a few is slower by chance would
    be taken off the warm-up as many times.
    """
    long = [
        phase.seconds / phase.steps
        for phase in spent.values()
        if phase.steps >= STEPS_OF_LONG_PHASE
    ]
    return min(blocks + long)


def _said(job: CompileJob, process: int, share: dict[str, Any]) -> str:
    """A line on an arm that has warmed up."""
    phases = [f"{name} {seconds} s" for name, seconds in share["warmup_phases_s"].items()]
    line = f"{job.workload}: {ARMS[process]} has warmed up in {share['warmup_s']:.1f} s"
    return ", of it ".join([line, *([", ".join(phases)] if phases else [])]) + "\n"


def _timed(step: Callable[[], torch.Tensor], device: torch.device) -> float:
    guard.synchronize(device)
    began = time.perf_counter()
    for _ in range(STEPS_PER_BLOCK):
        step()
    guard.synchronize(device)
    return (time.perf_counter() - began) / STEPS_PER_BLOCK


def _peak_gib(device: torch.device) -> float:
    """Return the peak of the device's memory while timed; on the CPU, the process's so far."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated() / 2**30)
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def record_of(job: CompileJob, shares: Sequence[dict[str, Any]]) -> Record:
    """The fields `COMPILE_FIELDS` of `bench.record`, without the provenance."""
    ours, eager, plain = shares
    dtype = "bfloat16" if job.device == "cuda" else "float32"

    def against_eager(share: dict[str, Any]) -> tuple[float, list[float]]:
        ratios = [a / b for a, b in zip(eager["times"], share["times"], strict=True)]
        middle = guard.median(ratios)
        return round(middle, 3), [round(quartile, 3) for quartile in timing.quartiles(ratios)]

    def per_s(share: dict[str, Any]) -> float:
        return float(round(share["samples"] / guard.median(share["times"]), 2))

    def loss_difference(share: dict[str, Any]) -> float | None:
        pairs = list(zip(share["losses"], eager["losses"], strict=True))
        if any(a is None or b is None for a, b in pairs):
            return None
        return float(max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs))

    speedup, spread = against_eager(ours)
    plain_speedup, plain_spread = against_eager(plain)
    difference = loss_difference(ours)
    decisions = ours["decisions"]
    return {
        "bench": "compile",
        "workload": job.workload,
        "world_size": 1,
        "engine": f"deepytorch.compile, policy {job.policy}",
        "device": job.device,
        "dtype": dtype,
        "parameters": ours["parameters"],
        "batch_size": ours["samples"],
        "stock": "eager",
        "stock_per_s": per_s(eager),
        "ours_per_s": per_s(ours),
        "plain_per_s": per_s(plain),
        "speedup": speedup,
        "speedup_spread": spread,
        "plain_speedup": plain_speedup,
        "plain_speedup_spread": plain_spread,
        "num_blocks": job.blocks,
        "loss_max_diff": difference,
        "plain_loss_max_diff": loss_difference(plain),
        "loss_check": "exact" if difference == 0 else "statistical",
        "stock_peak_gib": round(eager["peak_gib"], 3),
        "ours_peak_gib": round(ours["peak_gib"], 3),
        "plain_peak_gib": round(plain["peak_gib"], 3),
        "kept": ", ".join(decision["chosen"] for decision in decisions) or "undecided",
        "reason": "; ".join(decision["reason"] for decision in decisions),
        "dropped": {
            name: why for decision in decisions for name, why in decision.get("dropped", {}).items()
        },
        "warmup_s": round(ours["warmup_s"], 2),
        "plain_warmup_s": round(plain["warmup_s"], 2),
        "warmup_steps": ours["warmup_steps"],
        "warmup_phases_s": ours["warmup_phases_s"],
        "wrong": int(difference is None or difference > MAX_LOSS_DIFFERENCE[dtype]),
    }


if __name__ == "__main__":
    worker.leave(worker.serve(sys.argv[1:], CompileJob, measure))
