"""Checks of what must work in every environment with deepytorch installed; torchrun starts it.

    torchrun --standalone --nproc-per-node 2 smoke.py

Every collective that training uses is compared with gloo, and one DDP step is trained. Rank 0
prints a line with the versions.
"""

import platform

import torch
import torch.distributed as dist

import deepytorch

dist.init_process_group("cpu:deepytorch")
rank, size = dist.get_rank(), dist.get_world_size()
gloo = dist.new_group(backend="gloo", group_desc="reference")
generator = torch.Generator().manual_seed(rank)

for numel in (1, 1000, 300_001):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = torch.randint(-8, 8, (numel,), generator=generator).to(dtype)
        ours, theirs = mine.clone(), mine.clone()
        dist.all_reduce(ours)
        dist.all_reduce(theirs, group=gloo)
        assert torch.equal(ours, theirs), ("all_reduce", numel, dtype)
        ours, theirs = (torch.empty(size * numel, dtype=dtype) for _ in range(2))
        dist.all_gather_into_tensor(ours, mine)
        dist.all_gather_into_tensor(theirs, mine, group=gloo)
        assert torch.equal(ours, theirs), ("all_gather", numel, dtype)

torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
parts = [torch.empty_like(ddp.module.weight.grad) for _ in range(size)]
dist.all_gather(parts, ddp.module.weight.grad, group=gloo)
assert torch.equal(parts[0], parts[1]), "gradients differ"

report = deepytorch.report()
assert report.native_calls >= 19, report
if rank == 0:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"smoke: {versions}: {report.native_calls} native collectives, all equal gloo's")
dist.destroy_process_group()
