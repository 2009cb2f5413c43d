# SPDX-License-Identifier: Apache-2.0
"""Going on with another number of processes: the same examples in each step, the same steps.

A step trains on a piece of the epoch's order that all ranks take together. So the piece depends on
the product of processes, ``batch_size`` and ``accumulation`` alone. The product stays as it was:
each process takes more or fewer micro-batches instead. Random numbers of dropout do differ.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any, TypeVar

import torch

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process
from deepytorch.recipes.data.batches import EndlessBatches
from deepytorch.recipes.runner.checkpoint import Written, set_random_state

# With these every rank, or a reader of all parts, has all there is to know.
ENGINES = ("ddp", "accelerate", "fsdp2")

OptionsT = TypeVar("OptionsT", bound=RunOptions)


def fit(options: OptionsT, written: Written, process: Process, path: Path) -> OptionsT:
    """The options with the ``accumulation`` that makes steps as large as the checkpoint's.

    As they are where as many processes wrote it, or under an engine that can't have others, which
    loading says. Raises RecipeError when no number of micro-batches makes the step.
    """
    if written.world_size == process.world_size or options.engine not in ENGINES:
        return options
    examples = written.world_size * written.batch_size * written.accumulation
    at_once = process.world_size * options.batch_size
    if examples == 0 or examples % at_once:
        raise RecipeError(
            f"cannot resume from {path} with {process.world_size} processes: "
            f"{written.world_size} wrote it, with {examples or 'an unknown number of'} examples in "
            f"each step, which micro-batches of {at_once} do not make up. Start as many, or set "
            "batch_size so that processes x batch_size divides the examples of a step"
        )
    return dataclasses.replace(options, accumulation=examples // at_once)


def go_on(
    batches: EndlessBatches[Any],
    state: dict[str, Any],
    written: Written,
    options: RunOptions,
    process: Process,
) -> None:
    """Continue ``batches`` behind what all ranks of the checkpoint took, and random numbers where
    they were; a rank that the checkpoint does not know draws its own."""
    if written.batch_size == 0:  # before manifests said so; as many ranks, or `fit` refused it
        batches.position = state["position"]
    else:
        batches.continue_from(
            state["position"],
            state["epoch_examples"],
            batch_size=written.batch_size,
            world_size=written.world_size,
        )
    if "random" in state:
        set_random_state(state["random"], process.device)
    else:
        own = (options.seed * 1_000_003 + state["step"]) * 1_009 + process.rank
        torch.manual_seed(own)
        random.seed(own)
