"""torch's DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepytorch.workloads import Step, TrainJob, _model


def build(job: TrainJob, device: torch.device, *, ours: bool) -> Step:
    dist.init_process_group(job.baseline)
    model: torch.nn.Module = _model.make_model(job).to(device)
    if ours:
        from deepytorch.integrations.ddp import prepare_ddp

        model = prepare_ddp(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_model.LEARNING_RATE)
    return _model.plain_step(model, optimizer, _model.batches(job, device, dist.get_rank()))
