# SPDX-License-Identifier: Apache-2.0
"""How long a run is, in steps and in rounds through the data, and what it trains with by itself."""

import dataclasses
import math
from typing import Any, TypeVar

import torch

from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process, console
from deepytorch.recipes.data.batches import EndlessBatches

_WARMUP_SHARE, _LEAST_WARMUP = 0.03, 5
# Without a tolerance of its own a comparison allows what the type's rounding makes of a loss.
_TOLERANCE_OF_HALVES = 1e-2

OptionsT = TypeVar("OptionsT", bound=RunOptions)


def settle_device(options: OptionsT, device: torch.device) -> OptionsT:
    """The options with a precision and a tolerance in the place of ``auto`` and None."""
    precision = options.precision
    if precision == "auto":
        halves = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if halves and options.is_own else "fp32"
    tolerance = options.loss_tolerance
    if tolerance is None:
        tolerance = options.tolerance
        if precision != "fp32":
            tolerance = max(tolerance, _TOLERANCE_OF_HALVES)
    return dataclasses.replace(options, precision=precision, loss_tolerance=tolerance)


def settle_length(options: OptionsT, batches: EndlessBatches[Any], process: Process) -> OptionsT:
    """The options with the steps that they ask for, or their epochs, and says how long that is."""
    at_once = options.batch_size * process.world_size
    per_step = at_once * options.accumulation
    per_epoch = batches.epoch_examples / per_step
    steps, epochs = options.steps, options.epochs
    if steps is None and epochs is None:
        steps, epochs = options.usual_steps, options.usual_epochs
    if steps is None:
        steps = max(1, math.ceil((epochs or 0) * per_epoch))
    warmup = options.warmup_steps
    if warmup is None:
        warmup = max(_LEAST_WARMUP, math.ceil(_WARMUP_SHARE * steps))
    if process.is_main:
        whose = "your data" if options.data_is_own else "the embedded data"
        console.print(
            f"length      {steps:,} steps of {per_step:,} {batches.what} = "
            f"{_share(steps / per_epoch)} {whose}, which has {batches.num_examples:,}",
            highlight=False,
        )
    return dataclasses.replace(options, steps=steps, epochs=None, warmup_steps=warmup)


def _share(epochs: float) -> str:
    """In words that fit before the data: a share of it, or how many times all of it."""
    if epochs < 0.995:
        return f"{100 * epochs:.2g} % of"
    return f"{epochs:.3g} epochs of" if round(epochs, 2) != 1 else "1 epoch of"
