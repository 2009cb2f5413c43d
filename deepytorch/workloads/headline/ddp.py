"""Vision models of `bench ddp`: a row made from options, trained stock, with some of ours and all.

The arms are those of `bench train --workload`: fresh processes that take turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from deepytorch.examples import vision_models
from deepytorch.workloads import headline
from deepytorch.workloads.headline import run
from deepytorch.workloads.headline.job import ArmRun
from deepytorch_core.base.provenance import Record
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.percentiles import percentiles

PRECISIONS = ("fp32", "amp", "bf16")
COMPRESSIONS = ("", "bf16")
PARTS: Mapping[str, str] = MappingProxyType(
    {headline.COLLECTIVES: "collectives", headline.OURS: "all"}
)
"""The part of ours in each arm that is compared with the plain one."""
COMPRESSED_PARTS: Mapping[str, str] = MappingProxyType(
    {headline.PLAIN_BF16: "stock-bf16", headline.OURS_BF16: "all-bf16"}
)
"""In the further arms of `compress`."""
_NUM_CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class VisionJob(ArmRun):
    """One arm of a classifier's training under DDP.

    `model` is a name of `vision_models`, `image_size` the pixels of a side, `batch_size` a rank's,
    `steps` those of a round. With `compress` further arms send their gradients so: ours, and on
    GPUs stock's.
    """

    WORKER: ClassVar[str] = "deepytorch.workloads.headline.ddp_worker"
    APART: ClassVar[bool] = True

    model: str
    precision: str = "fp32"
    image_size: int = 224
    batch_size: int = 32
    compress: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in PRECISIONS:
            raise BenchError(
                f"unknown precision {self.precision!r}; known: {', '.join(PRECISIONS)}"
            )
        if self.compress not in COMPRESSIONS:
            raise BenchError(
                f"unknown --compress {self.compress!r}: expected bf16, or leave it out"
            )
        if self.compress and self.precision == "bf16":
            raise BenchError(
                "--precision bf16 has gradients in bfloat16 as they are: leave --compress out"
            )
        if self.world_size < 2:
            raise BenchError(f"one rank reduces nothing: --world-size {self.world_size}")
        for option, value in (("image-size", self.image_size), ("batch-size", self.batch_size)):
            if value < 1:
                raise BenchError(f"--{option} must be at least 1, not {value}")
        own = "nccl" if self.device == "cuda" else "gloo"
        if self.baseline != own:
            raise BenchError(
                f"{self.model} with --device {self.device} is compared with {own}: leave "
                "--baseline out"
            )

    @property
    def parts(self) -> Mapping[str, str]:
        """By arm what of ours takes part in it; the plain arm is not among them."""
        if not self.compress:
            return PARTS
        parts = {**PARTS, **COMPRESSED_PARTS}
        if self.device == "cpu":  # gloo is refused by torch's hook
            del parts[headline.PLAIN_BF16]
        return parts

    @property
    def row(self) -> headline.WorkloadRow:
        return headline.WorkloadRow(
            name=self.model,
            title=f"{self.model}, {self.precision}, micro-batch {self.batch_size}",
            builder="vision",
            full={"image": self.image_size, "classes": _NUM_CLASSES},
            tiny={},
            micro_batch=self.batch_size,
            world_size=self.world_size,
            unit="images",
            precision=self.precision,
            more={"family": "classifier", "model": self.model},
        )


def known(model: str, image_size: int) -> tuple[str, int]:
    """The model's one name, and its image size; 0 is what its weights expect.

    Raises BenchError for a model that no library has.
    """
    try:
        network = vision_models.load(model, image_size or None)
    except vision_models.UnknownModelError as error:
        raise BenchError(str(error)) from None
    prefix = "" if network.library == "torchvision" else f"{network.library}/"
    return prefix + network.name, network.image_size


def compare(job: VisionJob, *, rounds: int, say: run.Say) -> list[Record]:
    """Train every arm `rounds` times in turns; a record of `DDP_FIELDS` for each of `job.parts`.

    `say` is told what happens. Raises BenchError for what can't run here, WorkerError for a rank
    that failed.
    """
    samples = run.take_turns(job, (headline.PLAIN, *job.parts), rounds, say)
    return [_record(job, samples, arm) for arm in job.parts]


def _record(job: VisionJob, samples: dict[str, list[Record]], arm: str) -> Record:
    plain, ours = samples[headline.PLAIN], samples[arm]
    speedup, *spread = run.ratio(samples, headline.PLAIN, arm)
    losses = {name: _finite(samples[name][0]["losses"]) for name in (headline.PLAIN, arm)}
    difference = run.loss_difference({name: {"losses": curve} for name, curve in losses.items()})
    first = ours[0]
    is_narrow = job.precision == "bf16" or arm in COMPRESSED_PARTS
    same = ("baseline_settings", "machine", "versions", "commit")
    return {
        "bench": "ddp",
        "model": job.model,
        "part": job.parts[arm],
        "parameters": first["parameters"],
        "dtype": "bfloat16" if job.precision == "bf16" else "float32",
        "precision": job.precision,
        "image_size": job.image_size,
        "batch_size": job.batch_size,
        "world_size": job.world_size,
        "device": job.device,
        "registered": first["registered"],
        "algorithm": first["algorithm"],
        "bytes_per_step": first["parameters"] * (2 if is_narrow else 4),
        "steps": job.steps * len(ours),
        "num_blocks": len(ours),
        **_times(job, ours, ""),
        "baseline": job.baseline,
        **_times(job, plain, "baseline_"),
        "speedup": speedup,
        "speedup_spread": spread,
        "improvement_percent": round((speedup - 1) * 100, 1),
        "loss": losses[arm][-1],
        "baseline_loss": losses[headline.PLAIN][-1],
        "loss_difference": difference,
        "loss_check": "exact" if difference == 0 else "statistical",
        "wrong": int(difference is None or difference > run.LARGEST_LOSS_DIFFERENCE),
        "choices": first["choices"],
        "emulated": first.get("emulated"),
        **{name: first[name] for name in same},
    }


def _times(job: VisionJob, found: list[Record], arm: str) -> dict[str, Any]:
    """The percentiles over the steps of all rounds; their fields' names begin with `arm`."""
    times = percentiles([time for record in found for time in record["step_time_us"]])
    return {
        f"{arm}step_time_us": {name: round(time, 1) for name, time in times.items()},
        f"{arm}samples_per_s": {
            name: round(job.batch_size / (time * 1e-6), 2) for name, time in times.items()
        },
    }


def _finite(losses: list[float]) -> list[float | None]:
    """JSON has no word for what is no number."""
    return [loss if math.isfinite(loss) else None for loss in losses]
