"""ZeRO-3 with weights or the optimizer on the host: how updated weights get to the other side.

After each update DeepSpeed copies float32 weights into 16-bit ones. If one of the two is on the
host and the other on the GPU, torch converts on the CPU. The numbers go through memory that is new
every time and not pinned:

* From the GPU to the host (`offload_param` alone) float32 travels, twice the bytes. Here the GPU
  rounds first, and the copy goes straight into DeepSpeed's pinned memory.
* From the host to the GPU (`offload_optimizer` alone) all is rounded before any of it travels. Here
  pieces are rounded into two pinned ones in turn: one travels while the next is rounded.

All numbers get the same bits: rounding is to the nearest everywhere, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepytorch.integrations.common.contract import Changes
from deepytorch_core.base import decisions

_UPDATE = "_reassign_or_swap_out_partitioned_parameters"
_WHAT = "ZeRO-3's weights after an update"
_ROUNDED = 1 << 25  # elements: what is rounded needs GPU memory, but for no more than so many
_STAGED = 1 << 23  # elements of a pinned piece

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Gets flat 16-bit and flat exact weights, of as many elements."""


def attach(optimizer: Any, changes: Changes) -> None:
    """Have a ZeRO-3 optimizer copy weights our way; nothing for one whose copies stay as they are.

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
    staging = Staging()
    if stock is None or all(_copy_of(*group, staging) is None for group in groups):
        return

    def update(sub_group: int) -> None:
        rounded = optimizer.fp16_partitioned_groups_flat[sub_group]
        exact = optimizer.fp32_partitioned_groups_flat[sub_group]
        copy = _copy_of(rounded, exact, staging)  # DeepSpeed may move states between steps
        if copy is None:
            stock(sub_group)
            return
        copy(rounded.data, exact.data)
        optimizer._unflatten_partitioned_parameters(sub_group)

    setattr(optimizer, _UPDATE, update)
    changes.on_undo_of(optimizer, lambda changed: delattr(changed, _UPDATE))
    decisions.record(_WHAT, "ours", "rounded on the GPU, or piece by piece into pinned memory")


def _copy_of(rounded: torch.Tensor | None, exact: torch.Tensor, staging: Staging) -> Copy | None:
    """Our copy, where torch would convert on the CPU what goes to a GPU or comes from one."""
    if rounded is None or rounded.dtype == exact.dtype:  # in NVMe; or under autocast
        return None
    places = exact.device.type, rounded.device.type
    return {("cpu", "cuda"): staging.copy_to_device, ("cuda", "cpu"): copy_to_host}.get(places)


def copy_to_host(host: torch.Tensor, exact: torch.Tensor) -> None:
    """Copy flat `exact` into flat `host` of as many elements, converted where `exact` is.

    On return `host` may be read.
    """
    for begin in range(0, exact.numel(), _ROUNDED):
        piece = slice(begin, begin + _ROUNDED)
        host[piece].copy_(exact[piece].to(host.dtype), non_blocking=True)
    if exact.is_cuda:
        torch.cuda.current_stream(exact.device).synchronize()


class Staging:
    """Two pieces of pinned memory for each dtype, made when they are first needed."""

    def __init__(self) -> None:
        self._pieces: dict[torch.dtype, list[torch.Tensor]] = {}

    def copy_to_device(self, target: torch.Tensor, exact: torch.Tensor) -> None:
        """Copy flat `exact` on the host into flat `target`, converted on the way.

        On return `exact` may be changed, and `target` used on any stream.
        """
        pieces = self._pieces.get(target.dtype)
        if pieces is None:
            pinned = torch.cuda.is_available()
            pieces = [
                torch.empty(_STAGED, dtype=target.dtype, device="cpu", pin_memory=pinned)
                for _ in range(2)
            ]
            self._pieces[target.dtype] = pieces
        left: list[Any] = [None, None]
        for number, begin in enumerate(range(0, exact.numel(), _STAGED)):
            source = exact[begin : begin + _STAGED]
            piece = pieces[number % 2][: source.numel()]
            if left[number % 2] is not None:
                left[number % 2].synchronize()
            piece.copy_(source)
            target[begin : begin + _STAGED].copy_(piece, non_blocking=True)
            if target.is_cuda:
                left[number % 2] = torch.cuda.current_stream(target.device).record_event()
        if target.is_cuda:
            torch.cuda.current_stream(target.device).synchronize()
