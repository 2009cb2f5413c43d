"""torch's DistributedDataParallel, with its buckets or with small ones (ddp-small-buckets)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepytorch.workloads import Step, TrainJob, _model

_SMALL_MIB = 1  # as torch's first bucket is, and as people set who want all of them to start early


def build(job: TrainJob, device: torch.device, *, ours: bool) -> Step:
    dist.init_process_group(job.baseline)
    model: torch.nn.Module = _model.make_model(job).to(device)
    bucket_mib = _SMALL_MIB if job.framework == "ddp-small-buckets" else None  # None: torch's own
    if ours:
        from deepytorch.integrations.ddp import prepare_ddp

        model = prepare_ddp(model, bucket_cap_mb=bucket_mib)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=bucket_mib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_model.LEARNING_RATE)
    return _model.plain_step(model, optimizer, _model.batches(job, device, dist.get_rank()))
