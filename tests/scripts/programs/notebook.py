"""The cell of a notebook, run twice; the class is defined anew each time."""

CELL = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 1)
    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(6):
    optimizer.zero_grad()
    loss = net(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
"""

for _ in range(2):
    exec(compile(CELL, "<ipython-input-1>", "exec"), {"__name__": "__main__"})
