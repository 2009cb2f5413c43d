"""One rank of `bench ddp`: the same model trained by both arms, in turns, in one run.

Both arms start from the same weights and see the same batches in the same order, so their losses
can be compared step by step. Started by `launch.run`; see `worker` for how.
"""

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import timing, worker
from deepytorch_core.bench.job import MIN_BLOCKS, DdpJob, Run
from deepytorch_core.bench.percentiles import percentiles

NUM_LAYERS = 8
STEPS_PER_BLOCK = 4
# Untimed steps of each arm: DDP lays its buckets out anew in the second.
WARMUP_STEPS = 3
# Sums of more than two ranks depend on their order, and training carries the difference on.
MAX_LOSS_DIFFERENCE = 1e-3

_SEED = 20
_LEARNING_RATE = 1e-3


class DdpArm:
    """One arm: a model of its own, its optimizer, and the losses so far on this rank."""

    def __init__(self, job: DdpJob, groups: worker.Groups, group: dist.ProcessGroup) -> None:
        torch.manual_seed(_SEED)
        self.width = layer_width(job.parameters)
        model = build_model(self.width).to(groups.device)
        self.model = DistributedDataParallel(model, process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)
        # Data of this rank, the same for both arms.
        self._data = torch.Generator().manual_seed(_SEED + 1 + groups.rank)
        self._batch_size = job.batch_size
        self._device = groups.device
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        shape = (self._batch_size, self.width)
        inputs = torch.randn(shape, generator=self._data).to(self._device)
        targets = torch.randn(shape, generator=self._data).to(self._device)
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.detach())

    def loss_values(self) -> list[float]:
        return [float(loss) for loss in self.losses]


def layer_width(parameters: int) -> int:
    """Return the width of the preset "mlp" for about `parameters` weights in all."""
    return math.isqrt(parameters // NUM_LAYERS)


def build_model(width: int) -> torch.nn.Sequential:
    """The preset "mlp": square layers.

    With few samples a step computes little for the gradients it has to reduce.
    """
    layers: list[torch.nn.Module] = [torch.nn.Linear(width, width)]
    for _ in range(NUM_LAYERS - 1):
        layers += [torch.nn.ReLU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers)


def schedule(steps: int) -> timing.Schedule:
    """Blocks for at least `steps` timed steps of each arm, `MIN_BLOCKS` blocks or more."""
    repetitions = max(1, min(STEPS_PER_BLOCK, steps // MIN_BLOCKS))
    return timing.Schedule(math.ceil(steps / repetitions), (repetitions, repetitions))


def loss_difference(ours: Sequence[float], baseline: Sequence[float]) -> float:
    """The largest relative difference between losses of the same step; infinite for a NaN."""
    largest = 0.0
    for a, b in zip(ours, baseline, strict=True):
        if a == b:
            continue
        difference = abs(a - b) / max(abs(a), abs(b))
        largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest


def measure(job: DdpJob, rank: int, store: Store, emit: worker.Emit) -> None:
    """Trains both arms on this rank; rank 0 gives the record to `emit`."""
    groups = worker.Groups(job, rank, store)
    registered_buckets = has_registered_buckets(job, groups)
    with as_users_get_it(registered_buckets):
        ours = DdpArm(job, groups, groups.ours)
    baseline = DdpArm(job, groups, groups.baseline)
    before = worker.calls_by_algorithm(job.ours, "all_reduce")
    for _ in range(WARMUP_STEPS):
        ours.step()
        baseline.step()
    plan = schedule(job.steps)
    blocks = timing.follow(plan, (ours.step, baseline.step), clock=groups.clock, ranks=groups.ranks)
    after = worker.calls_by_algorithm(job.ours, "all_reduce")
    algorithm = worker.main_algorithm(before, after) if after else job.ours
    record = _record(job, blocks, (ours, baseline), groups.ranks)
    if rank == 0:
        emit({"record": {**record, "registered": registered_buckets, "algorithm": algorithm}})


def has_registered_buckets(job: Run, groups: worker.Groups) -> bool:
    """Whether `import deepytorch` puts the buckets of DDP modules on our group into its memory."""
    if job.ours != "deepytorch" or job.device != "cpu":
        return False
    return bool(groups.ours._get_backend(groups.device).supports_tensor_alloc(groups.device))


def as_users_get_it(registered_buckets: bool) -> AbstractContextManager[None]:
    """Do what `import deepytorch` does to the construction of a DDP module."""
    if not registered_buckets:
        return nullcontext()
    from deepytorch_core.c10d import registered

    return registered.place_ddp_buckets()


def _record(
    job: DdpJob,
    blocks: list[list[list[float]]],
    arms: tuple[DdpArm, DdpArm],
    ranks: worker.GroupAgreement,
) -> Record:
    comparison = timing.compare(blocks)
    times = [percentiles([t for block in arm for t in block]) for arm in blocks]
    rates = [{name: job.batch_size / (t * 1e-6) for name, t in arm.items()} for arm in times]
    losses = [arm.loss_values() for arm in arms]
    (difference,) = ranks.maximum([loss_difference(*losses)])
    limit = 0.0 if job.world_size == 2 else MAX_LOSS_DIFFERENCE
    parameters = list(arms[0].model.parameters())
    return {
        "bench": "ddp",
        "model": job.model,
        "part": "collectives",
        "parameters": sum(p.numel() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "precision": "fp32",
        "image_size": None,
        "batch_size": job.batch_size,
        "world_size": job.world_size,
        "device": job.device,
        "bytes_per_step": sum(p.numel() * p.element_size() for p in parameters),
        "steps": sum(len(block) for block in blocks[timing.OURS]),
        "num_blocks": comparison.num_blocks,
        "step_time_us": _rounded(times[timing.OURS], 1),
        "samples_per_s": _rounded(rates[timing.OURS], 2),
        "baseline": job.baseline,
        "baseline_step_time_us": _rounded(times[timing.BASELINE], 1),
        "baseline_samples_per_s": _rounded(rates[timing.BASELINE], 2),
        "speedup": round(comparison.speedup, 3),
        "speedup_spread": [round(value, 3) for value in comparison.spread],
        "improvement_percent": round((comparison.speedup - 1) * 100, 1),
        "loss": finite(losses[timing.OURS][-1]),
        "baseline_loss": finite(losses[timing.BASELINE][-1]),
        "loss_difference": finite(difference),
        "loss_check": "exact" if difference == 0 else "statistical",
        "wrong": int(difference > limit),
        "choices": {},
        "emulated": None,
    }


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinity: JSON has neither."""
    return value if math.isfinite(value) else None


def _rounded(values: dict[str, float], digits: int) -> dict[str, float]:
    return {name: round(value, digits) for name, value in values.items()}


if __name__ == "__main__":
    worker.leave(worker.serve(sys.argv[1:], DdpJob, measure))
