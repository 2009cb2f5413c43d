"""An arm as families of image models see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepytorch.workloads.headline.job import ArmRun
from deepytorch.workloads.headline.precision import Precision

NUM_BATCHES = 2

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ImageArm:
    """The arm as a family needs to know it; `layout`: in channels_last."""

    job: ArmRun
    device: torch.device
    precision: Precision
    layout: bool

    def place(self, model: nn.Module) -> nn.Module:
        """The model on the device, as the arm lays it out."""
        given: Any = model.to(self.device, self.precision.dtype)
        if not self.layout:
            return model
        placed: nn.Module = given.to(memory_format=torch.channels_last)
        return placed

    def laid_out(self, batch: Batch) -> Batch:
        if not self.layout:
            return batch
        last = torch.channels_last
        return {
            name: value.contiguous(memory_format=last) if value.dim() == 4 else value
            for name, value in batch.items()
        }
