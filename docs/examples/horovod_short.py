"""A script for horovod.torch: the first import is the only line that differs.

torchrun --standalone --nproc-per-node 2 docs/examples/horovod_short.py
"""

import torch

import deepytorch.integrations.horovod as hvd  # was: import horovod.torch as hvd

hvd.init()
torch.manual_seed(42)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Points of three classes around three centres; every rank has its own part of them.
centres = torch.randn(3, 8)
labels = torch.randint(3, (960,))
points = centres[labels] + 0.3 * torch.randn(960, 8)
dataset = torch.utils.data.TensorDataset(points, labels)
sampler = torch.utils.data.distributed.DistributedSampler(
    dataset, num_replicas=hvd.size(), rank=hvd.rank()
)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(3):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for batch, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach().cpu()
    average = hvd.allreduce(total / len(loader), name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {average.item():.4f}")
hvd.shutdown()
