"""DeepSpeed's ZeRO stages; ours is the flag in the configuration.

Parameters are bfloat16 where they (deepspeed-zero3-offload_param) or the optimizer
(deepspeed-zero3-offload_optimizer) are on the host; the other one stays on the GPU.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

from deepytorch.workloads import OFFLOAD, Step, TrainJob, _model


def build(job: TrainJob, device: torch.device, *, ours: bool) -> Step:
    stage, _, offloaded = job.framework.partition(OFFLOAD)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "zero_optimization": {"stage": int(stage[-1])},
        "zero_allow_untested_optimizer": True,
    }
    if offloaded:
        place = {"device": "cpu", "pin_memory": device.type == "cuda"}
        config["zero_optimization"][f"offload_{offloaded}"] = place
        config["zero_force_ds_cpu_optimizer"] = False
        config["bf16"] = {"enabled": True}
    if ours:
        config["deepytorch"] = {"enabled": True}
    model = _model.make_model(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_model.LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    next_batch = _model.batches(job, device, engine.global_rank)

    def step() -> torch.Tensor:
        inputs, targets = next_batch()
        output = engine(inputs.to(dtype))
        loss = _model.loss_of(output.float(), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
