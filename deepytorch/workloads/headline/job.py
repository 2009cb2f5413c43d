"""One arm of one row in fresh processes, as `bench.launch` starts them."""

from __future__ import annotations

import abc
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepytorch.workloads import headline
from deepytorch_core.bench.job import BenchError, Run

TINY_BATCH = 4
_SEED = 20


@dataclass(frozen=True, kw_only=True)
class ArmRun(Run, abc.ABC):
    """One arm of a `row`, which subclasses say; a rank of it is one process."""

    arm: str = headline.PLAIN
    scale: str = "full"
    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 2:
            raise BenchError(f"--steps must be at least 2, not {self.steps}")

    @property
    @abc.abstractmethod
    def row(self) -> headline.WorkloadRow:
        """Return what is trained, and how."""

    @property
    def shape(self) -> Mapping[str, int]:
        return self.row.shape(self.scale)

    @property
    def micro_batch(self) -> int:
        return self.row.micro_batch if self.scale == "full" else TINY_BATCH

    def environment(self, process: int, store_ports: Sequence[int]) -> dict[str, str]:
        """Return what torchrun would say of the rank, and what makes the arm."""
        seat = self.seats[process]
        return {
            "RANK": str(process),
            # Frameworks take it for the number of their GPU.
            "LOCAL_RANK": str(seat.device),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(sum(other.node == seat.node for other in self.seats)),
            "GROUP_RANK": str(seat.node),
            "TOKENIZERS_PARALLELISM": "false",
            # As for somebody who trains this for the first time, in the first round.
            "DEEPYTORCH_PROFILE": f"{self.scratch}/{self.arm}/profile.json",
            **self.caches(self.arm),
            **headline.environment(self.arm),
        }


@dataclass(frozen=True, kw_only=True)
class ArmJob(ArmRun):
    """An arm of a workload of the headline table; `layers` 0 is as many as the row has."""

    WORKER: ClassVar[str] = "deepytorch.workloads.headline.worker"

    workload: str
    layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workload not in headline.ROWS:
            raise BenchError(
                f"unknown workload {self.workload!r}; known: {', '.join(headline.ROWS)}"
            )
        if self.scale not in headline.SCALES:
            raise BenchError(f"unknown scale {self.scale!r}; known: {', '.join(headline.SCALES)}")
        if self.scale == "full" and self.device == "cpu":
            raise BenchError(f"{self.workload} at full scale needs GPUs: use --scale tiny on CPUs")
        row = headline.ROWS[self.workload]
        if row.zero_stage and self.world_size < 2:
            raise BenchError(f"{self.workload} shards over ranks: --world-size 2 or more")

    @property
    def row(self) -> headline.WorkloadRow:
        return headline.ROWS[self.workload]

    @property
    def shape(self) -> Mapping[str, int]:
        shape = dict(self.row.shape(self.scale))
        if self.layers and "layers" in shape:
            shape["layers"] = self.layers
        return shape


@dataclass(frozen=True, kw_only=True)
class TogetherJob(ArmJob):
    """Plain and ours' collectives, both in each process: see `together`."""

    WORKER: ClassVar[str] = "deepytorch.workloads.headline.together"

    def __post_init__(self) -> None:
        super().__post_init__()
        row = self.row
        if row.zero_stage or row.fsdp2:
            raise BenchError(
                f"--together is for what DDP trains, and {row.name} is not: leave it out"
            )
        if self.world_size < 2:
            raise BenchError(f"one rank reduces nothing: --world-size {self.world_size}")
        if self.nodes is not None:
            raise BenchError(
                "--together: arms in one process share NCCL's settings: leave --nodes out"
            )

    def environment(self, process: int, store_ports: Sequence[int]) -> dict[str, str]:
        # On, also where the caller has it off: `together` undoes what the import of it does.
        return {**super().environment(process, store_ports), headline.SWITCH: "1"}


def lengths(kind: str, number: int, longest: int, *, seed: int = 0) -> list[int]:
    """How many tokens each of `number` sequences has, the same for every arm.

    "instructions" are like instruction data: log-normal, median 150 of 1024, a long tail.
    """
    if kind == "full":
        return [longest] * number
    chance = random.Random(f"{_SEED} {seed}")
    if kind == "half":
        return [chance.randint(1, longest) for _ in range(number)]
    median = 150 / 1024 * longest
    drawn = [round(median * math.exp(chance.gauss(0, 0.9))) for _ in range(number)]
    return [min(max(length, 4), longest) for length in drawn]


def layers_that_fit(
    row: headline.WorkloadRow, micro_batch: int, world_size: int, memory: float
) -> int:
    """How many of the row's layers a GPU of `memory` bytes trains; all if they fit.

    Weights and gradients in bf16, AdamW's state in float32 sharded by ZeRO, activations by the
    count of Korthikanti et al. (2022) without recomputation: 34 bytes per token and hidden unit.
    """
    shape = row.full
    if not row.zero_stage or row.zero_stage == 3:
        return shape["layers"]
    hidden, ffn = shape["hidden"], shape["ffn"]
    kv = shape["kv_heads"] / shape["heads"]
    weights = hidden * hidden * (2 + 2 * kv) + 3 * hidden * ffn
    tokens = micro_batch * shape["length"]
    of_layer = weights * (2 + 2 + 12 / world_size) + 34 * tokens * hidden
    head = 2 * shape["vocabulary"] * hidden * (2 + 2 + 12 / world_size)
    logits = 12 * tokens * shape["vocabulary"]
    room = 0.9 * memory - head - logits
    return max(1, min(shape["layers"], int(room / of_layer)))
