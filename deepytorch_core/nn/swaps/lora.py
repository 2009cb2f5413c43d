"""LoRA's linear layers: PEFT runs the layer and its adapter one after the other, then adds.

PEFT's own layers count, by their class. Adapters in float32 beside weights in bfloat16 are what it
makes by itself. There it copies each input to float32, and autocast copies it back.

Each call is asked whether it is served: another adapter may be active by then, and others may put
hooks on the layer inside. All else takes PEFT's own way: merged, disabled or several adapters,
variants such as DoRA, and a layer whose own weights are trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch_core import guard
from deepytorch_core.nn.kernels import (
    Kernel,
    KernelPlace,
    KernelProbe,
    KernelSetting,
    Undo,
    register_kernel,
    register_place,
)
from deepytorch_core.nn.lora_linear import lora_linear
from deepytorch_core.nn.swaps import _forward

KIND = "lora"
_CLASS = "peft.tuners.lora.layer", "Linear"
_PLAIN = (Tensor, nn.Parameter)


@register_place(KIND)
def find(setting: KernelSetting) -> Iterable[KernelPlace]:
    """The linear layers with an adapter, by size."""
    found = [
        module
        for module in setting.model.modules()
        if (type(module).__module__, type(module).__name__) == _CLASS
        and type(_part(module, "base_layer")) is nn.Linear
        and _adapter(module) is not None
        and _forward.is_whole(module)
    ]
    for group in _forward.alike(found):
        layer, name = _part(group[0], "base_layer"), _adapter(group[0])
        rank = _part(group[0], "lora_A")[name].out_features
        yield KernelPlace(
            kind=KIND,
            what=f"LoRA({layer.in_features}, {layer.out_features}, rank {rank})",
            targets=group,
            probe=lambda first=group[0]: _probe(first, setting),  # type: ignore[misc]
            saves_memory=True,
        )


def _part(module: nn.Module, name: str) -> Any:
    return getattr(module, name, None)


def _adapter(module: Any) -> str | None:
    """The name of the one adapter that the layer adds to its own output, if it adds one."""
    if module._disable_adapters or module.merged_adapters:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    return active[0] if len(active) == 1 else None


def _probe(module: nn.Module, setting: KernelSetting) -> KernelProbe:
    probed: Any = copy.deepcopy(module).to(setting.device).train()
    up = probed.lora_B[_adapter(probed)].weight
    with torch.no_grad():  # zeros, as an adapter begins, would hide what is done with it
        size, device = up.numel(), up.device
        filling = torch.linspace(-0.1, 0.1, size, dtype=torch.float32, device=device)
        up.copy_(filling.view_as(up))
    layer = probed.base_layer
    x, gradient = _forward.random_input(
        probed, max(layer.in_features, layer.out_features), setting.device, layer.weight.dtype
    )
    x, gradient = x[:, : layer.in_features].contiguous(), gradient[:, : layer.out_features]

    def run() -> list[Tensor | None]:
        rows = x.clone().requires_grad_()
        y = probed(rows)
        torch.autograd.backward(y, gradient.to(y.dtype).contiguous())
        return [y, rows.grad]

    is_on_gpu = setting.device.type == "cuda"
    clock = (lambda call, ranks: _clock(setting.device)) if is_on_gpu else None
    return KernelProbe(probed, probed, run, clock=clock)


def _clock(device: torch.device) -> guard.Clock:
    """Whole models keep the GPU busy, or are replayed, where one layer's launches take longest."""
    from deepytorch_core.guard import gpu_time  # importing it takes seconds

    return gpu_time.launched_ahead(device)


@register_kernel
class AccumulatedLora(Kernel):
    """`deepytorch_core.nn.lora_linear`."""

    kind = KIND
    name = "accumulated"

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        return _forward.why_not(place.targets)

    def apply(self, target: nn.Module, setting: KernelSetting) -> Undo:
        return _forward.put(target, _serve)


def _serve(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The `forward` of layers that are served."""
    name = None if args or kwargs else _adapter(self)
    dtype = None if name is None or not _is_plain(self, name) else _computed_in(self, name, x)
    if name is None or dtype is None:
        result: Tensor = type(self).forward(self, x, *args, **kwargs)
        return result
    layer, down, up = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
    dropped = None
    if _drops(self, name):
        # In the format in which PEFT draws for it: the same elements are dropped.
        dropped = self.lora_dropout[name](self._cast_input_dtype(x, down.dtype)).to(dtype)
    return lora_linear(
        x.to(dtype),
        (layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype)),
        (down.to(dtype), up.to(dtype)),
        scale=self.scaling[name],
        dropped=dropped,
    )


def _drops(module: Any, name: str) -> bool:
    dropout = module.lora_dropout[name]
    return not isinstance(dropout, nn.Identity) and bool(module.training)


# No loops in these two: Dynamo traces them for each layer, and takes a millisecond for a round.
def _is_plain(module: Any, name: str) -> bool:
    """Whether the layer adds a plain adapter, and nobody wants to see its parts called."""
    down, up = module.lora_A[name], module.lora_B[name]
    return not (
        name in module.lora_variant
        or down.bias is not None
        or up.bias is not None
        or _is_hooked(module.base_layer)
        or _is_hooked(down)
        or _is_hooked(up)
        or (not torch.compiler.is_compiling() and guard.is_looked_at())
    )


def _is_hooked(layer: nn.Linear) -> bool:
    return bool(
        layer._forward_pre_hooks
        or layer._forward_hooks
        or layer._backward_pre_hooks
        or layer._backward_hooks
        # Dynamo would make a dictionary of it. Our compiled code looks at that (`Structure`).
        or (not torch.compiler.is_compiling() and "forward" in vars(layer))
    )


def _computed_in(module: Any, name: str, x: Tensor) -> torch.dtype | None:
    """The format that the layer computes in; None where it is not served."""
    weight, bias = module.base_layer.weight, module.base_layer.bias
    down, up = module.lora_A[name].weight, module.lora_B[name].weight
    if weight.requires_grad or not (_fits(weight, x) and _fits(down, x) and _fits(up, x)):
        return None
    if bias is not None and (bias.requires_grad or not _fits(bias, x)):
        return None
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        # Numbers in float64 it leaves as they are.
        is_wide = torch.float64 in (x.dtype, weight.dtype, down.dtype, up.dtype)
        return None if is_wide else torch.get_autocast_dtype(kind)
    is_one = x.dtype == weight.dtype == down.dtype == up.dtype
    return x.dtype if is_one and (bias is None or bias.dtype == x.dtype) else None


def _fits(parameter: Any, x: Tensor) -> bool:
    is_plain = type(parameter) in _PLAIN and type(x) in _PLAIN
    return is_plain and parameter.device == x.device and parameter.is_floating_point()
