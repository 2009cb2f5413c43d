"""torch's tensor parallelism: layers in pairs, the first split by columns, the second by rows.

Each pair adds up over all ranks in the forward pass and, but for the first, in the backward pass.
The computation that comes next waits for the sum. Ours needs nothing but `import deepytorch`.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from deepytorch.workloads import Step, TrainJob, _model
from deepytorch_core.bench.ddp import NUM_LAYERS, layer_width


def build(job: TrainJob, device: torch.device, *, ours: bool) -> Step:  # noqa: ARG001
    dist.init_process_group(job.baseline)
    mesh = init_device_mesh(device.type, (job.world_size,))
    width = max(1, layer_width(job.parameters) // job.world_size) * job.world_size
    job = dataclasses.replace(job, parameters=NUM_LAYERS * width * width)
    model = _model.make_model(job).to(device)
    layers = [name for name, layer in model.named_children() if isinstance(layer, torch.nn.Linear)]
    plan: dict[str, ParallelStyle] = {
        name: RowwiseParallel() if number % 2 else ColwiseParallel()
        for number, name in enumerate(layers)
    }
    split = parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(split.parameters(), lr=_model.LEARNING_RATE)
    # All ranks work on the same samples.
    return _model.plain_step(split, optimizer, _model.batches(job, device, 0))
