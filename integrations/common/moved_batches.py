"""Batches that Accelerate has moved to a device, as they were on the CPU.

Whoever packs a batch needs its lengths on the CPU, and would wait for the device that has it now.
A batch is known again by its tensors: as long as nobody has replaced or changed them, what was
collated is what the model gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from . import contract


@dataclass(frozen=True)
class _Moved:
    """A batch that was moved, and its tensors since."""

    mask: Tensor  # [batch, width] on the CPU, as are the labels
    labels: Tensor | None
    version: int  # of the mask on the device
    moved_labels: tuple[WeakIdRef, int] | None  # and their version


_moved: Any = WeakTensorKeyDictionary()


_WHY = "masks of batches are known on the host, so that packing waits for no device"
_OPTION = "DEEPYTORCH_PADDING_FREE=off"


def install(changes: contract.Changes) -> None:
    """Note what Accelerate's loaders move, from now on."""
    from accelerate import data_loader

    changes.replace(data_loader, "send_to_device", _noting, why=_WHY, option=_OPTION)


def find(mask: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    """Mask and labels on the CPU, if these are the very ones that were moved; else None."""
    moved = _moved.get(mask)
    if moved is None or mask._version != moved.version:
        return None
    if labels is None:
        return moved.mask, None
    if moved.moved_labels is None:
        return None
    reference, version = moved.moved_labels
    if reference() is not labels or labels._version != version:
        return None
    return moved.mask, moved.labels


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def send_to_device(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        before = _of(tensor)  # whose own mapping may be changed
        after = original(tensor, *args, **kwargs)
        if before is not None:
            _note(before, _of(after))
        return after

    return send_to_device


def _of(batch: Any) -> tuple[Tensor, Tensor | None] | None:
    """A batch's mask and labels."""
    if not isinstance(batch, Mapping):
        return None
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if not isinstance(mask, Tensor) or not isinstance(labels, Tensor | None):
        return None
    return mask, labels


def _note(before: tuple[Tensor, Tensor | None], after: tuple[Tensor, Tensor | None] | None) -> None:
    if after is None or before[0].device.type != "cpu" or after[0].device.type == "cpu":
        return
    (mask, labels), (moved, moved_labels) = before, after
    reference = None
    if labels is not None and moved_labels is not None:
        reference = (WeakIdRef(moved_labels), moved_labels._version)
    _moved[moved] = _Moved(mask, labels, moved._version, reference)
