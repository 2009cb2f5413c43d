# SPDX-License-Identifier: Apache-2.0
"""Checks what all ranks must have alike, and what none may have as another: random numbers.

Nodes have files of their own. Other data would leave ranks waiting for each other's batches. Other
weights would be trained as if they were one model.
"""

import hashlib
import platform
from typing import Any

import torch
from torch import nn

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process, all_of

_SAMPLES = 1024  # of each tensor


def refuse_unlike(process: Process, **facts: Any) -> None:
    """RecipeError, on every rank, naming the first of ``facts`` that two ranks have otherwise."""
    if process.world_size == 1:
        return
    ranks = all_of((platform.node(), facts), process)
    first_node, first = ranks[0]
    for rank, (node, own) in enumerate(ranks):
        for name, value in own.items():
            if value != first[name]:
                raise RecipeError(
                    f"{name.replace('_', ' ')}: {first[name]} for rank 0 on {first_node}, {value} "
                    f"for rank {rank} on {node}. Give all nodes the same files and options"
                )


def digest_of(model: nn.Module) -> str:
    """Tells apart weights of other files: from some elements of each parameter and buffer.

    Of their bits, since sums differ between kinds of GPUs.
    """
    found = hashlib.sha256()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        flat = value.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous()
        found.update(name.encode())
        found.update(some.view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:12]


def draw_apart(seed: int, process: Process) -> None:
    """Give every rank random numbers of its own: dropout, noise, timesteps.

    With the same ones, ranks draw the same noise for other examples, and a step sees less of it.
    """
    torch.manual_seed((seed * process.world_size + process.rank) % 2**63)
