# SPDX-License-Identifier: Apache-2.0
"""How much memory a run needs on each rank, before it starts: ``--dry-run``.

Weights, gradients and optimizer are counted exactly, by the engine's sharding. Activations are what
autograd keeps: one forward, of the largest batch that can come, counts what is saved for backward.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import nn

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process, console
from deepytorch.recipes.data.batches import BatchT
from deepytorch.recipes.runner.engines import enable_checkpointing

if TYPE_CHECKING:
    from deepytorch.recipes.runner.task import Task

_GB = 1e9
# Dense bf16 operations per second, by a part of the device's name; the makers' data sheets.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
}


def used_gb(device: torch.device) -> float:
    """The most memory that this process had in use so far: of the GPU, or its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GB


def has_room_for(model: nn.Module, device: torch.device) -> bool:
    """Whether all of ``model`` fits beside what the GPU holds already; the CPU always has room."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters()) < 0.8 * free


def peak_flops(device: torch.device) -> float:
    """The device's dense bf16 operations per second; 0 where they are not known."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), 0.0)


# Bytes for each trained weight; Muon has one moment of matrices and AdamW's two of the rest.
_MOMENTS_BYTES = {"adamw": 8, "muon": 8, "sgd": 0, "adafactor": 0}
_MOMENTS_BYTES |= {"adamw_8bit": 2, "paged_adamw_8bit": 2, "lion_8bit": 1}


def transformer_flops(model: nn.Module) -> float:
    """Operations of training on one token: 6 per trained weight, 4 per frozen one.

    Kaplan et al., 2020, without attention's own. Embeddings are looked up, not multiplied by.
    """
    looked_up = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        looked_up.discard(head.weight)
    weights = [weight for weight in model.parameters() if weight not in looked_up]
    return float(sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights))


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None  # None: not measured

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + (self.activations or 0)


def state_bytes(model: nn.Module, options: RunOptions, world_size: int) -> Estimate:
    """Weights, gradients and the optimizer's state of ``model`` on one rank, in GPU memory."""
    weights = list(model.parameters())
    all_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    gradients, moments, master = 4 * trained, _MOMENTS_BYTES[options.optimizer] * trained, 0
    if options.engine == "deepspeed" and options.precision != "fp32":
        all_bytes, gradients, master = all_bytes // 2, 2 * trained, 4 * trained
    stages = {"fsdp2": 3, "deepspeed": options.zero_stage, "megatron": 1}
    stage = stages.get(options.engine, 0)
    parameters = all_bytes // world_size if stage == 3 else all_bytes
    gradients = gradients // world_size if stage >= 2 else gradients
    optimizer = (moments + master) // world_size if stage else moments
    if options.offload != "none":
        optimizer = 0
    if options.offload == "parameters" or (options.offload != "none" and stage == 3):
        parameters = (
            0 if options.offload == "parameters" or options.engine == "fsdp2" else parameters
        )
    return Estimate(parameters, gradients, optimizer, None)


def estimate(task: "Task[BatchT]", options: RunOptions, process: Process) -> Estimate:
    """All of it, with the activations of one micro-batch measured in a forward on the CPU."""
    model = task.make_model()
    state = state_bytes(model, options, process.world_size)
    model.train()
    if options.gradient_checkpointing:
        enable_checkpointing(model)
    counter = _Saved(model)
    batch = task.batches.largest().to(torch.device("cpu"))
    loss = task.make_loss(model, False)
    enabled = options.precision != "fp32"
    with (
        torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled),
    ):
        loss(batch, batch.counts()[0])
    return Estimate(state.parameters, state.gradients, state.optimizer, counter.total)


class _Saved:
    """Counts each storage once; weights are counted elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self._seen = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._seen:
            self._seen.add(place)
            self.total += tensor.untyped_storage().nbytes()
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def print_estimate(task: "Task[Any]", options: RunOptions, process: Process) -> None:
    """``--dry-run``: the estimate, and what of it fits."""
    found = estimate(task, options, process)
    if not process.is_main:
        return
    sharding: str = options.engine
    if options.engine == "deepspeed":
        sharding += f" ZeRO-{options.zero_stage}"
    table = Table(title=f"memory of each of {process.world_size} ranks, {sharding}")
    table.add_column()
    table.add_column("GB", justify="right")
    for label, value in (
        ("parameters", found.parameters),
        ("gradients", found.gradients),
        (f"optimizer ({options.optimizer})", found.optimizer),
        (f"activations, {options.batch_size} a micro-batch", found.activations or 0),
        ("sum", found.total),
    ):
        table.add_row(label, f"{value / _GB:.3f}")
    console.print(table)
    if process.device.type == "cuda":
        there = torch.cuda.get_device_properties(process.device).total_memory
        verdict = "fits" if found.total < 0.92 * there else "does not fit"
        console.print(f"{verdict} in the {there / _GB:.0f} GB of this GPU", highlight=False)


def refuse_if_too_large(model: nn.Module, options: RunOptions, process: Process) -> None:
    """RecipeError if weights, gradients and optimizer alone are more than the GPU has."""
    if process.device.type != "cuda":
        return
    needed = state_bytes(model, options, process.world_size).total
    there = torch.cuda.get_device_properties(process.device).total_memory
    if needed > there:
        raise RecipeError(
            f"weights, gradients and optimizer need {needed / _GB:.0f} GB on each rank, and the "
            f"GPU has {there / _GB:.0f} GB: use engine=fsdp2 or engine=deepspeed zero_stage=3, "
            "offload=optimizer, more GPUs, or a recipe with LoRA"
        )
