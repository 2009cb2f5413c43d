"""FSDP2 buffers in registered memory, for adapters of frameworks that call `fully_shard`.

The seam is torch's own `FSDPModule.set_allocate_memory_from_process_group_for_comm`: FSDP2 asks the
group's backend for the buffers that it gathers into and scatters from. Nothing else changes.
"""

from __future__ import annotations

from typing import Any

from deepytorch.integrations.common import contract


def place_buffers(model: Any, changes: contract.Changes) -> int:
    """Let every FSDP2 module within `model` take its buffers from its process group.

    For modules on the CPU. On GPUs the stock collectives carry the calls, so memory stays theirs.

    Args:
        model: anything; only a module that `fully_shard` was applied to has something to place.
        changes: receives what undoes it.

    Returns how many modules that were. A module with custom collectives of its own is left alone.
    """
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    placed = 0
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, FSDPModule) and _is_on_cpu(module):
            try:
                module.set_allocate_memory_from_process_group_for_comm(True)
            except AssertionError:  # torch's answer when set_custom_all_gather was called
                continue
            changes.on_undo_of(module, _take_back)
            placed += 1
    return placed


def _take_back(module: Any) -> None:
    module.set_allocate_memory_from_process_group_for_comm(False)


def _is_on_cpu(module: Any) -> bool:
    from torch.distributed.tensor import DTensor

    shards = (p for p in module.parameters() if isinstance(p, DTensor))
    first = next(shards, None)
    return first is not None and first.device_mesh.device_type == "cpu"
