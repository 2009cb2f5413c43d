"""The models of `deepytorch bench train`: a small one under each framework, stock and ours.

A module here is one framework. Its `build(job, device, ours)` returns a function that trains one
step and returns its loss: with `ours` set up the way the framework's page in docs/ says, else as
its users have it without deepytorch. Nothing else may differ between the two; what deepytorch does
besides collectives is off.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, ClassVar, Protocol

from deepytorch_core.bench.job import BenchError, TrainingRun
from deepytorch_core.bench.timing import BASELINE, OURS

if TYPE_CHECKING:
    import torch

Step = Callable[[], "torch.Tensor"]

WORKLOADS = {
    "ddp": "ddp",
    "ddp-small-buckets": "ddp",
    "fsdp1": "fsdp",
    "fsdp2": "fsdp",
    "deepspeed-zero1": "deepspeed",
    "deepspeed-zero2": "deepspeed",
    "deepspeed-zero3": "deepspeed",
    "deepspeed-zero3-offload_param": "deepspeed",
    "deepspeed-zero3-offload_optimizer": "deepspeed",
    "accelerate-ddp": "accelerate",
    "accelerate-fsdp2": "accelerate",
    "megatron": "megatron",
    "tensor-parallel": "tensor_parallel",
    "tensor-parallel-decode": "tensor_parallel_decode",
}
"""Workload -> the module here that builds it."""
OFFLOAD = "-offload_"
"""Before what of ZeRO's is on the host, in names; parameters are then in bfloat16."""
ON_GPUS_ONLY = {
    "accelerate-fsdp2": "accelerate leaves FSDP out on CPUs: use --framework fsdp2",
    "megatron": "Megatron's models are for GPUs",
}


class Workload(Protocol):
    """The interface of a module here."""

    def build(self, job: TrainJob, device: torch.device, *, ours: bool) -> Step:
        """Called on each rank before torch.distributed is initialised, seeds set."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainJob(TrainingRun):
    """`bench train`: each rank is two processes, one for each arm, which take turns."""

    WORKER: ClassVar[str] = "deepytorch.workloads.worker"
    NUM_STORES: ClassVar[int] = 2

    framework: str = "ddp"
    first: int = OURS  # the arm that builds and warms up first
    trace: str = ""  # the folder for the processes' traces, if any

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.framework not in WORKLOADS:
            raise BenchError(f"unknown framework {self.framework!r}; known: {', '.join(WORKLOADS)}")
        if self.device == "cpu" and self.framework in ON_GPUS_ONLY:
            raise BenchError(f"{self.framework} on CPUs: {ON_GPUS_ONLY[self.framework]}")
        stock = "gloo" if self.device == "cpu" else "nccl"
        if self.baseline != stock:
            raise BenchError(f"frameworks train on {self.device} over {stock}: --baseline {stock}")

    @property
    def num_processes(self) -> int:
        return 2 * self.world_size

    def arm_name(self, arm: int) -> str:
        return self.baseline if arm == BASELINE else "deepytorch"

    def environment(self, process: int, store_ports: Sequence[int]) -> dict[str, str]:
        """Return what torchrun would set, for one of the two arms; each has a store of its own."""
        arm, rank = divmod(process, self.world_size)
        seat = self.seats[rank]
        stock = {"DEEPYTORCH_ENABLED": "0"}
        # Compute has its own measurements (`bench compile`, `--workload`). Here its trials would
        # fall into the timed steps, and its rounding would be taken for the collectives'.
        collectives_alone = {
            f"DEEPYTORCH_{name}": "off" for name in ("COMPILE", "KERNELS", "PADDING_FREE")
        }
        return {
            "RANK": str(rank),
            # Frameworks take it for the number of their GPU.
            "LOCAL_RANK": str(seat.device),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(sum(other.node == seat.node for other in self.seats)),
            "GROUP_RANK": str(seat.node),
            "MASTER_ADDR": "127.0.0.1",  # on emulated nodes the launcher says another
            "MASTER_PORT": str(store_ports[arm]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **(stock if arm == BASELINE else collectives_alone),
        }


def version(framework: str) -> str:
    """The installed version of the package that the workload is about."""
    module = WORKLOADS[framework]
    distributions = {
        "accelerate": "accelerate",
        "deepspeed": "deepspeed",
        "megatron": "megatron-core",
    }
    return metadata.version(distributions.get(module, "torch"))


def load(framework: str) -> Workload:
    """The workload's module; raises BenchError naming the package that is missing."""
    try:
        module: Workload = importlib.import_module(f"{__name__}.{WORKLOADS[framework]}")
    except ModuleNotFoundError as error:
        raise BenchError(
            f"{framework} needs {error.name}: pip install 'deepytorch-train[all]', or another "
            "--framework"
        ) from None
    return module
