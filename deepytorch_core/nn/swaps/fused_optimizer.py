"""torch's own optimizers in their fused form: one kernel for many parameters.

Adam, AdamW and SGD take `fused=True`. A training that did not ask gets it while a step runs, by
hooks of the step. So its parameter groups say what they said, whoever looks at them, copies or
saves them. What somebody chose with foreach= or fused= stays, and so do sparse gradients.

NOTE [Strides]. torch's fused kernels walk a parameter, its gradient and its state as flat memory
and don't check that their strides agree. Where they differ the update is silently wrong; in the
other forms it is right. They differ after a state of other strides was loaded, or where gradients
were assigned. So a state is laid out like its parameter when it comes in, and gradients are
compared before each step.

NOTE [Momentum]. torch's fused SGD makes momentum only if no parameter has any yet; one whose first
gradient comes later, or that was loaded without, is an error. So momentum that is not there yet is
made before the step, as zeros. The first update comes out the same from these, and a first step
that is skipped leaves them as they are.

What a GradScaler found reaches the kernels without a wait: see `deepytorch_core.nn.scaler_step`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from deepytorch_core import guard
from deepytorch_core.base import decisions
from deepytorch_core.nn import scaler_step
from deepytorch_core.nn.kernels import (
    Kernel,
    KernelPlace,
    KernelProbe,
    KernelSetting,
    Undo,
    register_kernel,
    register_place,
)

KIND = "optimizer"
CLASSES = (Adam, AdamW, SGD)
# Elements of the copies that are tried.
_ELEMENTS = {"cpu": 1 << 20}
_DEFAULT_ELEMENTS = 1 << 25
_STEPS = 4

_switched: weakref.WeakSet[Any] = weakref.WeakSet()


@register_place(KIND)
def find(setting: KernelSetting) -> Iterable[KernelPlace]:
    """torch's optimizers that are not fused yet."""
    for optimizer in setting.optimizers:
        own = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
        if type(own) in CLASSES and not all(group.get("fused") for group in own.param_groups):
            yield KernelPlace(
                kind=KIND,
                what=type(own).__name__,
                targets=(own,),
                probe=lambda chosen=own: _probe(chosen, setting),  # type: ignore[misc]
                facts={"groups": [_facts(group) for group in own.param_groups]},
            )


def _facts(group: dict[str, Any]) -> dict[str, Any]:
    """Settings that choose another kernel."""
    names = ("amsgrad", "maximize", "momentum", "nesterov", "capturable")
    return {name: bool(group[name]) for name in names if name in group}


@register_kernel
class Fused(Kernel):
    """`fused=True` in every parameter group."""

    kind = KIND
    name = "fused"

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        (optimizer,) = place.targets
        if (
            setting.mode == "auto"
            and guard.Ranks(place.what).size > 1
            and not is_cut(setting.model)
        ):
            return "replicas must step alike, and ranks may measure differently: fused=True does it"
        if setting.device.type not in _get_fused_kernels_supported_devices():
            return f"torch has no fused kernel on {setting.device.type}"
        for group in optimizer.param_groups:
            for name in ("foreach", "fused"):
                if group.get(name) is not None:
                    return f"{name}={group[name]} was asked for"
            if group.get("differentiable"):
                return "differentiable=True was asked for"
            if group.get("dampening"):
                return "dampening leaves the first step out, which the fused kernel can't tell"
            for parameter in group["params"]:
                if not parameter.is_floating_point():
                    return f"a parameter is {parameter.dtype}"
        if any(getattr(module, "sparse", False) for module in setting.model.modules()):
            return "an embedding has sparse gradients"
        return None

    def apply(self, target: Any, setting: KernelSetting) -> Undo:
        return _Switch(target).undo


def is_cut(model: nn.Module) -> bool:
    """Whether each rank trains a part of its own, so that no replicas can drift apart."""
    return any(
        hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id")
        for parameter in model.parameters()
    )


def is_fused(optimizer: Any) -> bool:
    """Whether the steps of an optimizer, one of `CLASSES`, are fused ones, whoever chose that."""
    is_asked = all(group.get("fused") for group in optimizer.param_groups)
    return is_asked or optimizer in _switched


class _Switch:
    """Makes an optimizer's steps fused ones.

    Args:
        optimizer: one of `CLASSES`, no group of which asks for another form.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        _switched.add(optimizer)
        self._is_off = False
        self._is_laid_out = False  # its state is where fused kernels want it
        self._fused: list[dict[str, Any]] = []  # groups, while a step runs
        self._handles: list[Any] = [
            optimizer.register_load_state_dict_post_hook(self._loaded),
            optimizer.register_state_dict_post_hook(_save_as_stock),
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
            scaler_step.ScalerHandle(optimizer, self.is_whole),
        ]

    def is_whole(self) -> bool:
        """Whether the next step is a fused one for every group."""
        optimizer = self._optimizer()
        return (
            not self._is_off
            and optimizer is not None
            and all(map(_is_free, optimizer.param_groups))
        )

    def undo(self) -> None:
        """Make its steps stock's again."""
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            self._turn_off(optimizer)

    def lay_out(self) -> None:
        """Have the state laid out anew before the next step."""
        self._is_laid_out = False

    def _loaded(self, optimizer: Any) -> None:
        self.lay_out()

    def _begin(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        if self._is_off:
            return
        if _has_sparse_gradients(optimizer):
            decisions.record(type(optimizer).__name__, "stock", "gradients are sparse")
            self._turn_off(optimizer)
            return
        if not self._is_laid_out:
            _place_steps(optimizer, on_device=True)
            match_state(optimizer)
            optimizer._need_device_dtype_check_for_fused = True
            self._is_laid_out = True
        match_gradients(optimizer)
        if isinstance(optimizer, SGD):
            _fill_momentum(optimizer)
        self._fused = [group for group in optimizer.param_groups if _is_free(group)]
        for group in self._fused:
            group["fused"] = True

    def _end(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        for group in self._fused:
            group["fused"] = None
        self._fused = []

    def _turn_off(self, optimizer: Any) -> None:
        self._end(optimizer)
        self._is_off = True
        _switched.discard(optimizer)
        _place_steps(optimizer, on_device=False)
        vars(optimizer).pop("_need_device_dtype_check_for_fused", None)


def _is_free(group: dict[str, Any]) -> bool:
    """Whether nobody has chosen a form for the group."""
    return group.get("fused") is None and group.get("foreach") is None


def _has_sparse_gradients(optimizer: Any) -> bool:
    return any(
        parameter.grad is not None and parameter.grad.layout is not torch.strided
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _save_as_stock(optimizer: Any, saved: dict[str, Any]) -> None:
    """A state_dict post-hook: what is saved here trains right without these hooks too.

    The saved states are the optimizer's own, so what differs goes into a copy.
    """
    for group in saved["param_groups"]:
        for key in () if group.get("capturable") else group["params"]:
            state = saved["state"].get(key, {})
            if isinstance(state.get("step"), torch.Tensor):
                saved["state"][key] = {**state, "step": state["step"].cpu()}


def _place_steps(optimizer: Any, *, on_device: bool) -> None:
    """Put the counts of steps where fused kernels have them, or where others do."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                is_there = on_device or group.get("capturable")
                where = parameter.device if is_there else torch.device("cpu")
                state["step"] = state["step"].to(where, torch.float32)


def match_gradients(optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
    """A step pre-hook: lay out gradients like their parameters. See NOTE [Strides]."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if gradient.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(gradient)


def _fill_momentum(optimizer: Any) -> None:
    """See NOTE [Momentum]."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            state = optimizer.state[parameter]
            if parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def match_state(optimizer: Any) -> None:
    """Lay out an optimizer's state like the parameters. See NOTE [Strides]."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if like and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _probe(optimizer: Any, setting: KernelSetting) -> KernelProbe:
    """An optimizer of the same kind over new parameters of the same shapes."""
    left = _ELEMENTS.get(setting.device.type, _DEFAULT_ELEMENTS)
    generator = torch.Generator().manual_seed(left)
    groups: list[dict[str, Any]] = []
    start: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        own = []
        for parameter in group["params"]:
            # ZeRO-3 may keep a part of it on each rank: this is the shape of the whole.
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            size = math.prod(shape)
            if size and (size <= left or not start):
                shape = shape if size <= left else (left,)
                left -= min(size, left)
                values, gradient = (
                    torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
                    for _ in range(2)
                )
                start.append((0.02 * values).to(setting.device, parameter.dtype))
                gradients.append(gradient.to(setting.device, parameter.dtype))
                own.append(nn.Parameter(start[-1].clone()))
        # A learning rate of a warm-up's start would hide what the kernel does.
        groups.append({**group, "params": own, "lr": 1e-3})
    groups = [group for group in groups if group["params"]]
    probed = type(optimizer)(groups)
    module = nn.ParameterList(parameter for group in groups for parameter in group["params"])
    own_parameters = list(module)

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            torch._foreach_copy_(own_parameters, start)
        probed.state.clear()
        for parameter, gradient in zip(own_parameters, gradients, strict=True):
            parameter.grad = gradient
        for _ in range(_STEPS):
            probed.step()
        return [
            # The rest of an update after rounding in half precision is not comparable.
            (now - then).detach() if now.dtype.itemsize >= 4 else now.detach().clone()
            for now, then in zip(own_parameters, start, strict=True)
        ]

    return KernelProbe(module, probed, run)
