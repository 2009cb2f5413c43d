"""A GAN, and a module that is never called but holds the one that is, as Lightning's does."""

import torch
from torch import nn

torch.manual_seed(0)


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, x):
        return self.net(x).square().mean()


task = Task()
optimizer = torch.optim.SGD(task.parameters(), lr=0.05)
for step in range(8):
    loss = task.training_step(torch.randn(4, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")

make = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
judge = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
for_make = torch.optim.Adam(make.parameters(), lr=0.01)
for_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
for step in range(6):
    real, fake = torch.randn(4, 4), make(torch.randn(4, 4))
    loss = nn.functional.softplus(-judge(real)).mean()
    loss = loss + nn.functional.softplus(judge(fake.detach())).mean()
    for_judge.zero_grad()
    loss.backward()
    for_judge.step()
    for_make.zero_grad()
    other = nn.functional.softplus(-judge(fake)).mean()
    other.backward()
    for_make.step()
    print(f"step {step} loss {loss.item():.6f} {other.item():.6f}")
