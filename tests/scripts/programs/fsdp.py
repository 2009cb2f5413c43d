"""FullyShardedDataParallel with a policy that wraps each block, then the whole."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 1))
wrap = functools.partial(ModuleWrapPolicy({nn.Linear}))
model = FullyShardedDataParallel(net, auto_wrap_policy=wrap(), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(8):
    loss = model(torch.randn(4, 8, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}")
dist.destroy_process_group()
