"""Accelerate's prepare() with DDP or FSDP2; ours is the plugin."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin

from deepytorch.workloads import Step, TrainJob, _model


def build(job: TrainJob, device: torch.device, *, ours: bool) -> Step:
    settings: dict[str, Any] = {"cpu": device.type == "cpu"}
    if device.type == "cpu":
        dist.init_process_group(job.baseline)  # without it accelerate does not distribute on CPUs
    if job.framework == "accelerate-fsdp2":
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=job.parameters // 16
        )
    if ours:
        from deepytorch.integrations.accelerate import DeepytorchPlugin

        settings["kwargs_handlers"] = [DeepytorchPlugin()]
    accelerator = Accelerator(**settings)
    model = _model.make_model(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_model.LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    next_batch = _model.batches(job, accelerator.device, accelerator.process_index)

    def step() -> torch.Tensor:
        inputs, targets = next_batch()
        optimizer.zero_grad()
        loss = _model.loss_of(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return step
