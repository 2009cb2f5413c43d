"""FullyShardedDataParallel with a policy that wraps each block, then the whole."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(Block(), Block(), nn.Linear(8, 1))
model = FullyShardedDataParallel(
    net, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(8):
    loss = model(torch.randn(4, 8, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}")
dist.destroy_process_group()
