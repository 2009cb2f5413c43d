# SPDX-License-Identifier: Apache-2.0
"""The task that a recipe hands to the loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from torch import nn

from deepytorch.recipes.data.batches import BatchT, EndlessBatches

LossShare = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task(Generic[BatchT]):
    """The task that a recipe hands to the loop; everything else is the same for all of them."""

    make_model: Callable[[], nn.Module]
    """A model with the same weights at each call."""
    make_loss: Callable[[Any, bool], LossShare]
    """(model as the engine wraps it, whether deepytorch may change how it computes) -> a function
    of batch and total that gives the sum of this batch's losses divided by the total."""
    batches: EndlessBatches[BatchT]
    held_out: Sequence[BatchT]
    """This rank's batches that are never trained on."""
    unit: str
    """The word for what the speed counts: "tokens", "images"."""
    learning_rate: float
    """Taken if the options leave it open."""
    export: Callable[[Any, Path], None]
    """Called on rank 0 after training with the model and the run's folder."""
    balanced: EndlessBatches[BatchT] | None = None
    """``batches`` with the examples of each step evenly spread, where deepytorch may do that."""
    repacked: bool = False
    """Whether deepytorch may lay a batch out otherwise than stock, as rows without padding."""
    before: Callable[[Any], None] | None = None
    """Called once on all ranks before the first step, with the `Trainer`, whose model is as it
    begins; collective."""
    flops_of: Callable[[nn.Module], float] | None = None
    """Floating-point operations of training a model on one unit, for its utilisation."""
