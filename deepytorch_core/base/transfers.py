"""Copies of small tensors to a GPU that wait for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the CPU to a device, in line with what it still has to do.

    From memory that is not pinned, CUDA copies after all work before it, and the host waits for
    that. Pinned memory is kept until the copy is done, by who allocates it.
    """
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
