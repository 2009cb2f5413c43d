"""Answers what the DDP and FSDP adapters ask of a process group, and measures on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deepytorch_core.base.config import Options
from deepytorch_core.c10d import patches as c10d_patches
from deepytorch_core.c10d import rewrite
from deepytorch_core.c10d.backend import NAME

from . import contract
from .contract import IntegrationError


def require_torch() -> None:
    """Raises IntegrationError when this torch is not one that the adapters know."""
    contract.require("torch", ">=2.11,<2.16", tested="2.13.0")


def require_served(
    adapter: str, group: dist.ProcessGroup, device: torch.device, options: Options
) -> None:
    """Raises IntegrationError when deepytorch does not serve `group` for tensors on `device`."""
    if options.collectives == "stock":
        return
    backends = c10d_patches.served(c10d, group)
    backend = backends.get(device.type)
    if backend == NAME:
        return
    served = f"its group serves by {backend}" if backend else "its group does not serve"
    raise IntegrationError(
        f"{adapter}: the model is on {device.type}, which {served} "
        f"({rewrite.join(backends)}): call init_process_group() without a backend, and new_group() "
        "too, or pass collectives='stock'"
    )


def buffer(numel: int, like: torch.Tensor, dtype: torch.dtype, group: Any) -> torch.Tensor:
    """A flat tensor for communication, on the device of `like`; registered memory on the CPU."""
    if like.device.type == "cpu":
        backend = group._get_backend(like.device)
        if backend.supports_tensor_alloc(like.device):
            made: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=like.device)
            return made
    return torch.empty(numel, dtype=dtype, device=like.device)


def slowest(
    times: Sequence[Sequence[float]], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> list[list[float]]:
    """Every rank's times, as the slowest rank saw them; all ranks of all `groups` get the same.

    Collective over each of the groups in turn. The rows are of one length.
    """
    table = torch.tensor(times, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    rows: list[list[float]] = table.tolist()
    return rows
