"""SwiGLU: the gate, its SiLU and the product of a decoder's feed-forward part.

Any module counts that has the usual three projections and SiLU between them; torch has no kernel
for it, so those come from elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from deepytorch_core.nn.kernels import KernelPlace, KernelProbe, KernelSetting, register_place
from deepytorch_core.nn.swaps import _forward

KIND = "swiglu"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@register_place(KIND)
def find(setting: KernelSetting) -> Iterable[KernelPlace]:
    """The feed-forward parts of the model, by size."""
    found = [
        module
        for module in setting.model.modules()
        if _is_swiglu(module) and _forward.is_whole(module)
    ]
    for group in _forward.alike(found):
        width = group[0].get_submodule("gate_proj")
        assert isinstance(width, nn.Linear)
        yield KernelPlace(
            kind=KIND,
            what=f"{type(group[0]).__name__}({width.in_features}, {width.out_features})",
            targets=group,
            probe=lambda first=group[0]: _probe(first, setting),  # type: ignore[misc]
        )


def _is_swiglu(module: nn.Module) -> bool:
    children = dict(module.named_children())
    if not all(isinstance(children.get(name), nn.Linear) for name in _PROJECTIONS):
        return False  # before anything is read that other modules may not like to be asked for
    act = getattr(module, "act_fn", None)
    return (isinstance(act, nn.SiLU) or type(act).__name__ in ("SiLU", "SiLUActivation")) and set(
        children
    ) <= {*_PROJECTIONS, "act_fn"}


def _probe(module: nn.Module, setting: KernelSetting) -> KernelProbe:
    probed = copy.deepcopy(module).to(setting.device).train()
    first = probed.get_submodule("gate_proj")
    assert isinstance(first, nn.Linear)
    x, gradient = _forward.random_input(
        probed, first.in_features, setting.device, first.weight.dtype
    )

    def run() -> list[torch.Tensor | None]:
        rows = x.clone().requires_grad_()
        y = probed(rows)
        torch.autograd.backward(y, gradient[:, : y.shape[-1]].to(y.dtype))
        return [y, rows.grad]

    return KernelProbe(probed, probed, run)
