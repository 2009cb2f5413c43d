"""Batches are copied to the GPU beside the steps that are under way.

Accelerate's loaders copy a batch and wait for it. The copy lies in line behind all work that the
GPU still has, so the host can't prepare the next step meanwhile. Copied on a stream of its own, a
batch waits for nothing but its own transfer. The copy is over when the call returns, so whoever
wrote to the CPU's tensors afterwards still may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepytorch.integrations.common import contract

_WHY = "batches are copied to the GPU without waiting for the steps that it still has to do"
_OPTION = "DEEPYTORCH_COMPILE=off"

_streams: dict[torch.device, torch.cuda.Stream] = {}


def install(changes: contract.Changes) -> None:
    """Have Accelerate's loaders copy so, from now on."""
    from accelerate import data_loader

    changes.replace(data_loader, "send_to_device", _aside, why=_WHY, option=_OPTION)


def _aside(original: Callable[..., Any]) -> Callable[..., Any]:
    def send_to_device(tensor: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = _gpu(device)
        if place is None or not _is_on_host(tensor) or torch.cuda.is_current_stream_capturing():
            return original(tensor, device, *args, **kwargs)
        own = torch.cuda.current_stream(place)
        with torch.cuda.stream(_stream(place)):
            moved = original(tensor, device, *args, **kwargs)
        # A copy that is not waited for, as loaders may be told, is waited for by what uses it.
        own.wait_stream(_stream(place))
        for leaf in _tensors(moved):
            if leaf.is_cuda:
                leaf.record_stream(own)
        return moved

    return send_to_device


def _gpu(device: Any) -> torch.device | None:
    """The GPU that `device` names, if it names the current one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        found = torch.device(device)
    except (TypeError, RuntimeError):
        return None
    here = torch.cuda.current_device()
    if found.type != "cuda" or found.index not in (None, here):
        return None
    return torch.device("cuda", here)


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def _is_on_host(batch: Any) -> bool:
    """Whether all of its tensors are the CPU's; other ones may still be written to by a stream."""
    found = _tensors(batch)
    return bool(found) and all(
        type(tensor) is Tensor and tensor.device.type == "cpu" for tensor in found
    )


def _tensors(batch: Any) -> list[Tensor]:
    # Classes of their own that are mappings, as BatchEncoding, count as one leaf.
    plain = dict(batch) if isinstance(batch, Mapping) else batch
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, Tensor)]
