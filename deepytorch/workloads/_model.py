"""The model, the data and the loss that all workloads share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepytorch.workloads import TrainJob
from deepytorch_core.bench.ddp import build_model, layer_width

SEED = 20
LEARNING_RATE = 1e-3

Batch = tuple[torch.Tensor, torch.Tensor]


def make_model(job: TrainJob) -> torch.nn.Sequential:
    """Square layers in float32, the same weights on every rank and in both arms."""
    torch.manual_seed(SEED)
    return build_model(layer_width(job.parameters))


def batches(job: TrainJob, device: torch.device, rank: int) -> Callable[[], Batch]:
    """A function that gives the rank's next batch: inputs and targets, [batch_size, width]."""
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    shape = (job.batch_size, layer_width(job.parameters))

    def next_batch() -> Batch:
        inputs = torch.randn(shape, generator=generator)
        targets = torch.randn(shape, generator=generator)
        return inputs.to(device), targets.to(device)

    return next_batch


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, targets)


def plain_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, next_batch: Callable[[], Batch]
) -> Callable[[], torch.Tensor]:
    """The loop that torch's own tutorials teach."""

    def step() -> torch.Tensor:
        inputs, targets = next_batch()
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step
