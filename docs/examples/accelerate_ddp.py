"""Train a small classifier with Accelerate on deepytorch.

    deepytorch run --nproc-per-node 2 docs/examples/accelerate_ddp.py --cpu

Without --cpu it takes the GPUs; `accelerate launch` starts it as well.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deepytorch
from deepytorch.integrations.accelerate import DeepytorchPlugin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    plugin = DeepytorchPlugin(ddp_kwargs={"gradient_as_bucket_view": True})
    accelerator = Accelerator(cpu=options.cpu, kwargs_handlers=[plugin])

    set_seed(0)
    inputs = torch.randn(1024, 32)
    labels = inputs[:, :4].argmax(dim=1)
    batches = DataLoader(TensorDataset(inputs, labels), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    for step, (batch, targets) in enumerate(batches, 1):
        loss = nn.functional.cross_entropy(model(batch), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps:
            accelerator.print(f"step {step} loss {loss.item():.3f}")
        if step == options.steps:
            break
    accelerator.print(deepytorch.report())
    accelerator.end_training()


if __name__ == "__main__":
    main()
