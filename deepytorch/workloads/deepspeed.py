"""DeepSpeed's ZeRO stages; ours is the flag in the configuration."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

from deepytorch.workloads import Step, TrainJob, _model


def build(job: TrainJob, device: torch.device, *, ours: bool) -> Step:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "zero_optimization": {"stage": int(job.framework[-1])},
        "zero_allow_untested_optimizer": True,
    }
    if ours:
        config["deepytorch"] = {"enabled": True}
    model = _model.make_model(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_model.LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    next_batch = _model.batches(job, device, engine.global_rank)

    def step() -> torch.Tensor:
        inputs, targets = next_batch()
        loss = _model.loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
