"""ZeRO-3 with parameters in host memory and the optimizer on the GPU: weights are rounded there.

After each update DeepSpeed copies the float32 weights into the 16-bit ones on the host. torch
converts such a copy on the CPU: float32 travels, twice the bytes, into pageable memory that is new
every time, and one pass of the CPU rounds it. Rounded on the GPU first, the copy goes straight into
DeepSpeed's pinned memory. All numbers get the same bits: both round to the nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepytorch_core import decisions

from ._contract import Changes

_UPDATE = "_reassign_or_swap_out_partitioned_parameters"
_PIECE = 1 << 25  # elements; what is rounded needs GPU memory, but for no more than so many


def attach(optimizer: Any, changes: Changes) -> None:
    """Have a ZeRO-3 optimizer round on the GPU; nothing for one whose copies stay as they are.

    Args:
        optimizer: the engine's, of any kind.
        changes: take it back with the rest.
    """
    stock: Callable[[int], None] | None = getattr(optimizer, _UPDATE, None)
    groups = zip(
        getattr(optimizer, "fp16_partitioned_groups_flat", ()),
        getattr(optimizer, "fp32_partitioned_groups_flat", ()),
        strict=False,
    )
    if stock is None or not any(_is_rounded_on_host(*group) for group in groups):
        return

    def update(sub_group: int) -> None:
        host = optimizer.fp16_partitioned_groups_flat[sub_group]
        exact = optimizer.fp32_partitioned_groups_flat[sub_group]
        if not _is_rounded_on_host(host, exact):  # DeepSpeed may move states between steps
            stock(sub_group)
            return
        copy_rounded(host.data, exact.data)
        optimizer._unflatten_partitioned_parameters(sub_group)

    setattr(optimizer, _UPDATE, update)
    changes.on_undo_of(optimizer, lambda one: delattr(one, _UPDATE))
    decisions.record("ZeRO-3's offloaded weights", "rounded on the GPU", "half the bytes to copy")


def _is_rounded_on_host(host: torch.Tensor | None, exact: torch.Tensor) -> bool:
    return (
        host is not None
        and host.device.type == "cpu"
        and exact.device.type != "cpu"
        and host.dtype != exact.dtype
    )


def copy_rounded(host: torch.Tensor, exact: torch.Tensor) -> None:
    """Copy flat `exact` into flat `host` of as many elements, converted where `exact` is.

    On return `host` may be read.
    """
    for begin in range(0, exact.numel(), _PIECE):
        piece = slice(begin, begin + _PIECE)
        host[piece].copy_(exact[piece].to(host.dtype), non_blocking=True)
    if exact.is_cuda:
        torch.cuda.current_stream(exact.device).synchronize()
