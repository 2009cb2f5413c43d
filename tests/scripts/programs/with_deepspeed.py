"""deepspeed.initialize with ZeRO-1, without a word of deepytorch in its configuration."""

import deepspeed
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
generator = torch.Generator().manual_seed(engine.global_rank)
for step in range(8):
    loss = engine(torch.randn(4, 8, generator=generator)).square().mean()
    engine.backward(loss)
    engine.step()
    print(f"step {step} loss {loss.item():.6f}")
