"""DDP with its gradients in registered memory, sent as bfloat16, in buckets of measured size.

torchrun --standalone --nproc-per-node 2 docs/examples/ddp.py
"""

# ruff: noqa: T201
import torch
import torch.distributed as dist
from torch import nn

import deepytorch
from deepytorch.integrations.ddp import prepare_ddp

dist.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.Linear(1024, 8))
ddp = prepare_ddp(model, tune_buckets=True, compress="bf16", gradient_as_bucket_view=True)

optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(60):
    x = torch.randn(32, 64, generator=data)
    loss = nn.functional.mse_loss(ddp(x), x[:, :8])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.4f}")

if dist.get_rank() == 0:
    print(deepytorch.report())
dist.destroy_process_group()
