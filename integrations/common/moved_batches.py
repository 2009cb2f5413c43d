"""Batches that Accelerate has moved to a device, as they were on the CPU.

Whoever packs a batch needs its lengths on the CPU, and would wait for the device that has it now.
A batch is known again by its tensors: as long as nobody has replaced or changed them, what was
collated is what the model gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import contract

# Those that tell where sequences begin and end, and what is trained.
_NOTED = ("attention_mask", "labels", "position_ids", "cu_seq_lens_q")


class _Moved(NamedTuple):
    """A tensor before it was moved."""

    before: Tensor  # on the CPU
    versions: tuple[int, int]  # of it and of the one on the device


_moved: Any = WeakTensorKeyDictionary()


_WHY = "lengths of batches are known on the host, so that packing waits for no device"
_OPTION = "DEEPYTORCH_PADDING_FREE=off"


def install(changes: contract.Changes) -> None:
    """Note what Accelerate's loaders move, from now on."""
    from accelerate import data_loader

    changes.replace(data_loader, "send_to_device", _noting, why=_WHY, option=_OPTION)


def find(tensor: Tensor) -> Tensor | None:
    """Return the tensor as it was on the CPU; None if it was not noted, or was changed since."""
    moved = _moved.get(tensor)
    if moved is None or (moved.before._version, tensor._version) != moved.versions:
        return None
    before: Tensor = moved.before
    return before


def on_host(tensor: Tensor) -> Tensor:
    """Return the same, or a copy for which the tensor's device is waited for."""
    found = find(tensor)
    return tensor.detach().to("cpu") if found is None else found


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def send_to_device(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        before = _of(tensor)  # whose own mapping may be changed
        after = original(tensor, *args, **kwargs)
        moved = _of(after)
        for name in before.keys() & moved.keys():
            _note(before[name], moved[name])
        return after

    return send_to_device


def _of(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch that are noted."""
    if not isinstance(batch, Mapping):
        return {}
    noted = {name: batch.get(name) for name in _NOTED}
    return {name: value for name, value in noted.items() if isinstance(value, Tensor)}


def _note(before: Tensor, after: Tensor) -> None:
    if before.device.type == "cpu" and after.device.type != "cpu":
        _moved[after] = _Moved(before, (before._version, after._version))
