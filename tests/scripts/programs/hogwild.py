"""Processes train one shared model as Hogwild does, in turns so that losses repeat."""

import torch
import torch.multiprocessing as mp
from torch import nn


class Shared(nn.Sequential):
    pass


def train(worker, model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, batch in enumerate(inputs):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        print(f"worker {worker} step {step} loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    context = mp.get_context("fork")
    model = Shared(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model.share_memory()
    for worker in range(2):
        process = context.Process(target=train, args=(worker, model, torch.randn(6, 4, 8)))
        process.start()
        process.join()
        print(f"worker {worker} left with", process.exitcode)
    # The parent trains on, with what the children have made of the weights.
    train("none", model, torch.randn(6, 4, 8))
