"""torch's FullyShardedDataParallel (fsdp1) and fully_shard (fsdp2)."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from deepytorch.workloads import Step, TrainJob, _model


def build(job: TrainJob, device: torch.device, *, ours: bool) -> Step:
    dist.init_process_group(job.baseline)
    make = _fsdp1 if job.framework == "fsdp1" else _fsdp2
    model = make(_model.make_model(job).to(device), device, ours=ours)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_model.LEARNING_RATE)
    return _model.plain_step(model, optimizer, _model.batches(job, device, dist.get_rank()))


def _fsdp1(
    model: torch.nn.Sequential, device: torch.device, *, ours: bool
) -> FullyShardedDataParallel:
    first = next(iter(model.parameters()))
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(
            size_based_auto_wrap_policy, min_num_params=first.numel()
        ),
        device_id=device,
    )
    if ours:
        from deepytorch.integrations.fsdp import register_comm_hook

        register_comm_hook(wrapped)
    return wrapped


def _fsdp2(model: torch.nn.Sequential, device: torch.device, *, ours: bool) -> torch.nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if ours:
        from deepytorch.integrations.fsdp import apply_fsdp2

        apply_fsdp2(model)
    return model
