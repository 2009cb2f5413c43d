"""A small training to try a platform with: DDP on whatever each rank has, a GPU or cores.

deepytorch run --nproc-per-node 2 docs/examples/platforms/train.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(1, 61):
    x = torch.randn(32, 64, generator=data).to(device)
    loss = nn.functional.mse_loss(ddp(x), x[:, :8])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 20 == 0:
        print(f"step {step} on {dist.get_world_size()} ranks: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
