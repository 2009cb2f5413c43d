"""FSDP2 with its buffers in registered memory, then FSDP1 with a hook that sends bfloat16.

torchrun --standalone --nproc-per-node 2 docs/examples/fsdp.py
"""

# ruff: noqa: T201
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import deepytorch
from deepytorch.integrations.fsdp import apply_fsdp2, register_comm_hook


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.Linear(512, 8))


def train(model: nn.Module, name: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(30):
        x = torch.randn(32, 64, generator=data)
        loss = nn.functional.mse_loss(model(x), x[:, :8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"{name}, step {step + 1}: loss {loss.item():.4f}")


dist.init_process_group()

model = make_model()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
apply_fsdp2(fully_shard(model, mesh=mesh))
train(model, "FSDP2")

wrapped = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"))
register_comm_hook(wrapped, compress="bf16")
train(wrapped, "FSDP1")

if dist.get_rank() == 0:
    print(deepytorch.report())
dist.destroy_process_group()
