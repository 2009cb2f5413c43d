"""RMSNorm: models write it as half a dozen operations, torch has it as one.

Any module counts whose class is called ...RMSNorm, with one weight and an epsilon. Whether its
arithmetic is the usual one, or adds 1 to the weight as Gemma's, is for the comparison to find out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepytorch_core.nn.kernels import (
    Kernel,
    KernelPlace,
    KernelProbe,
    KernelSetting,
    Undo,
    register_kernel,
    register_place,
)
from deepytorch_core.nn.swaps import _forward

KIND = "rms_norm"


def epsilon(module: nn.Module) -> float | None:
    """Return the number that the module adds to the mean square; None if it does not say."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


@register_place(KIND)
def find(setting: KernelSetting) -> Iterable[KernelPlace]:
    """The RMSNorms of the model, by size."""
    found = [
        module
        for module in setting.model.modules()
        if _is_rms_norm(module) and _forward.is_whole(module)
    ]
    for group in _forward.alike(found):
        weight = group[0].weight
        assert isinstance(weight, torch.Tensor)
        yield KernelPlace(
            kind=KIND,
            what=f"{type(group[0]).__name__}({weight.numel()})",
            targets=group,
            probe=lambda first=group[0]: _probe(first, setting),  # type: ignore[misc]
        )


def _is_rms_norm(module: nn.Module) -> bool:
    own = list(module.parameters())
    return (
        type(module).__name__.endswith("RMSNorm")
        and type(module) is not nn.RMSNorm  # one operation already
        and len(own) == 1
        and own[0].dim() == 1
        and getattr(module, "weight", None) is own[0]
        and epsilon(module) is not None
    )


def _probe(module: nn.Module, setting: KernelSetting) -> KernelProbe:
    probed = copy.deepcopy(module).to(setting.device).train()
    (weight,) = probed.parameters()
    # Not as initialised: a weight of ones would hide what is done to it.
    with torch.no_grad():
        size, device = weight.numel(), weight.device
        weight.copy_(torch.linspace(0.5, 1.5, size, dtype=torch.float32, device=device))
    x, gradient = _forward.random_input(probed, weight.numel(), setting.device, weight.dtype)

    def run() -> list[torch.Tensor | None]:
        rows = x.clone().requires_grad_()
        y = probed(rows)
        torch.autograd.backward(y, gradient.to(y.dtype))
        return [y, rows.grad]

    return KernelProbe(probed, probed, run)


@register_kernel
class TorchRMSNorm(Kernel):
    """`torch.nn.functional.rms_norm`, which is one kernel where the device has it."""

    kind = KIND
    name = "torch"

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        return _forward.why_not(place.targets)

    def apply(self, target: nn.Module, setting: KernelSetting) -> Undo:
        return _forward.replace(target, _rms_norm)


def _rms_norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight: Any = module.weight
    return F.rms_norm(x, (weight.shape[0],), weight, epsilon(module))


@register_kernel
class TorchOffsetRMSNorm(TorchRMSNorm):
    """The same with 1 added to the weight, as in Gemma, Qwen3-Next and Qwen3.5.

    These multiply in float32, and round once. In bfloat16 the sum would lose all but seven bits of
    a small weight. So the kernel gets float32, and the conversions around it are two more.
    """

    name = "torch_offset"

    def apply(self, target: nn.Module, setting: KernelSetting) -> Undo:
        return _forward.replace(target, _offset_rms_norm)


def _offset_rms_norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight: Any = module.weight
    wide = x if x.dtype == torch.float64 else x.float()
    factor = 1.0 + weight.to(wide.dtype)
    return F.rms_norm(wide, (weight.shape[0],), factor, epsilon(module)).to(x.dtype)
