"""liger-kernel's RMSNorm, RoPE, SwiGLU and linear cross-entropy as candidates, where installed.

They are written in Triton, so they are candidates on CUDA only. Under torch.compile the models' own
code is traced instead: it fuses as well there, and liger's kernels break its graphs.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
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
from deepytorch_core.nn.linear_cross_entropy import is_linear
from deepytorch_core.nn.swaps import _forward, rms_norm, swiglu

from . import causal_loss

ROPE = "rope"
_FUNCTION = "apply_rotary_pos_emb"


@functools.cache
def _operation(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


def _why_not_here(setting: KernelSetting) -> str | None:
    if setting.device.type != "cuda":
        return f"liger-kernel runs on CUDA, the training on {setting.device.type}"
    return None


@register_kernel
class LigerRMSNorm(Kernel):
    kind = rms_norm.KIND
    name = "liger"

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        return _why_not_here(setting) or _forward.why_not(place.targets)

    def apply(self, target: nn.Module, setting: KernelSetting) -> Undo:
        return _forward.replace(target, liger_rms_norm)


def liger_rms_norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    function = _operation("rms_norm", "LigerRMSNormFunction")
    weight: Any = module.weight
    # Not in place: the gradient it would write over may have other readers.
    found: torch.Tensor = function.apply(x, weight, rms_norm.epsilon(module), 0.0, "llama", False)
    return found


@register_kernel
class LigerSwiGLU(Kernel):
    kind = swiglu.KIND
    name = "liger"

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        return _why_not_here(setting) or _forward.why_not(place.targets)

    def apply(self, target: nn.Module, setting: KernelSetting) -> Undo:
        return _forward.replace(target, liger_swiglu)


def liger_swiglu(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    function = _operation("swiglu", "LigerSiLUMulFunction")
    parts: dict[str, Any] = dict(module.named_children())
    gated = function.apply(parts["gate_proj"](x), parts["up_proj"](x))
    found: torch.Tensor = parts["down_proj"](gated)
    return found


@register_place(ROPE)
def find_rope(setting: KernelSetting) -> Iterable[KernelPlace]:
    """The function that rotates queries and keys, one for all models of a Python module."""
    seen = set()
    for module in setting.model.modules():
        space = sys.modules.get(type(module).__module__)
        if space is None or space.__name__ in seen or not hasattr(space, _FUNCTION):
            continue
        seen.add(space.__name__)
        config = getattr(setting.model, "config", None)
        sizes = [getattr(config, name, None) for name in ("hidden_size", "num_attention_heads")]
        if not all(isinstance(size, int) for size in sizes):
            continue
        width, heads = sizes
        head = getattr(config, "head_dim", None) or width // heads  # type: ignore[operator]
        yield KernelPlace(
            kind=ROPE,
            what=f"RoPE of {space.__name__.rpartition('.')[2]}({head})",
            targets=(space,),
            probe=lambda space=space, head=head: _rope_probe(space, head, setting),  # type: ignore[misc]
            facts={"head": head, "space": space.__name__},
        )


def _rope_probe(space: Any, head: int, setting: KernelSetting) -> KernelProbe:
    generator = torch.Generator().manual_seed(head)
    dtype = setting.autocast or next(setting.model.parameters()).dtype

    on_host: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, **on_host).to(setting.device, dtype)

    half = torch.rand(1, 512, head // 2, **on_host) * 6.28
    angles = torch.cat([half, half], dim=-1).to(setting.device)
    inputs = nn.ParameterDict({"q": draw(2, 8, 512, head), "k": draw(2, 2, 512, head)})
    gradients = [draw(2, 8, 512, head), draw(2, 2, 512, head)]
    namespace = types.SimpleNamespace(**{_FUNCTION: _stock_of(getattr(space, _FUNCTION))})

    def run() -> list[torch.Tensor]:
        # As in a model: what is rotated was computed, and is a view with heads before positions.
        q, k = (inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qk")
        rotate = getattr(namespace, _FUNCTION)
        found = rotate(q, k, angles.cos().to(dtype), angles.sin().to(dtype))
        torch.autograd.backward(found, [gradient.clone() for gradient in gradients])
        return [output.detach() for output in found]

    return KernelProbe(inputs, namespace, run)


@register_kernel
class LigerRope(Kernel):
    kind = ROPE
    name = "liger"

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        return _why_not_here(setting)

    def apply(self, target: Any, setting: KernelSetting) -> Undo:
        now = getattr(target, _FUNCTION)
        rotation = _rotations.get(now)
        if rotation is None:
            rotation = _Rotation(_rotating(now), now)
            _rotations[rotation.ours] = rotation
            setattr(target, _FUNCTION, rotation.ours)
        rotation.owners += 1
        # Other models of this Python module may go on with it, and a model may go without an undo.
        undo = weakref.finalize(setting.model, _let_go, target, rotation)
        undo.atexit = False
        return undo


@dataclass
class _Rotation:
    """A replaced function, and how many models asked for that."""

    ours: Callable[..., Any]
    stock: Callable[..., Any]
    owners: int = 0


# By our function, as long as a model wants it.
_rotations: dict[Callable[..., Any], _Rotation] = {}


def _stock_of(function: Callable[..., Any]) -> Callable[..., Any]:
    rotation = _rotations.get(function)
    return function if rotation is None else rotation.stock


def _let_go(target: Any, rotation: _Rotation) -> None:
    rotation.owners -= 1
    if rotation.owners == 0:
        _rotations.pop(rotation.ours, None)
        if getattr(target, _FUNCTION) is rotation.ours:
            setattr(target, _FUNCTION, rotation.stock)


def _rotating(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or torch.compiler.is_compiling() or q.device.type != "cuda":
            return stock(q, k, cos, sin, *args, **kwargs)
        return _operation("rope", "LigerRopeFunction").apply(q, k, cos, sin)

    return apply_rotary_pos_emb


@register_kernel
class LigerLoss(causal_loss._LossKernel):
    """liger's fused linear cross-entropy; for a head that is a matrix product and no more."""

    name = "liger"

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        (owner,) = place.targets
        head = owner.get_output_embeddings()
        if not is_linear(head):
            return f"liger-kernel has none for a head of class {type(head).__name__}"
        return _why_not_here(setting) or super().why_not(place, setting)

    @staticmethod
    def loss_sum(
        hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, ignore_index: int
    ) -> torch.Tensor:
        function = importlib.import_module("liger_kernel.transformers.functional")
        found: torch.Tensor = function.liger_fused_linear_cross_entropy(
            hidden, head.weight, targets, head.bias, ignore_index=ignore_index, reduction="sum"
        )
        return found
