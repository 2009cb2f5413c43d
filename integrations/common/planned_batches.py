"""How batches pack, found out before the model gets them.

A loader that loads early has time for it. A plan holds as long as nobody changes its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from deepytorch_core.data import Packing, plan


@dataclass(frozen=True)
class _Planned:
    packing: Packing
    shifted: bool
    versions: tuple[int, int | None]  # of the mask and the labels
    labels: WeakIdRef | None


_planned: Any = WeakTensorKeyDictionary()
# How the last batch was planned, by a mask on the CPU; None: none was.
_shifted: bool | None = None


def plan_of(mask: Tensor, labels: Tensor | None, *, shifted: bool) -> Packing:
    """The same as `deepytorch_core.data.plan`, which may have been made before."""
    global _shifted
    found = _planned.get(mask)
    if found is not None and found.shifted == shifted and _is_of(found, mask, labels):
        packing: Packing = found.packing
        return packing
    if mask.device.type == "cpu":
        _shifted = shifted
    return plan(mask, labels, shifted=shifted)


def plan_ahead(batch: Any) -> None:
    """Plan a batch that comes later, if batches are planned and it is one of the CPU."""
    if _shifted is None or not isinstance(batch, Mapping):
        return
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if not isinstance(mask, Tensor) or not isinstance(labels, Tensor | None):
        return
    if any(tensor is not None and tensor.device.type != "cpu" for tensor in (mask, labels)):
        return
    packing = plan(mask, labels, shifted=_shifted)
    versions = mask._version, None if labels is None else labels._version
    reference = None if labels is None else WeakIdRef(labels)
    _planned[mask] = _Planned(packing, _shifted, versions, reference)


def _is_of(planned: _Planned, mask: Tensor, labels: Tensor | None) -> bool:
    known = None if planned.labels is None else planned.labels()
    versions = mask._version, None if labels is None else labels._version
    return known is labels and planned.versions == versions
