"""DistributedDataParallel, as its tutorial has it, and one more in a group of one rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
alone = [dist.new_group([member]) for member in range(dist.get_world_size())]
for name, group in (("all", None), ("alone", alone[rank])):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        optimizer.zero_grad()
        inputs = torch.randn(4, 10, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), torch.ones(4, 5))
        loss.backward()
        optimizer.step()
        print(f"{name} step {step} loss {loss.item():.6f}")
dist.destroy_process_group()
