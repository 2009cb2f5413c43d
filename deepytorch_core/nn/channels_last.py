"""channels_last for convolutional networks: the layout that convolution kernels compute in.

The policy for models whose weights are largely those of 2-D convolutions. Device, dtype and image
size decide which layout is faster. So it is tried on the training's own first batch, before the
first optimizer step. It is kept only if the results are the same and the step is faster. Inputs
alone are converted. Weights stay as they are for optimizers, savers and whoever views them. The
library that convolves lays them out for itself, which takes little beside a batch of images.
Dropout fills its mask in the order of memory, so the same random numbers fall on other elements.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from deepytorch_core import guard
from deepytorch_core.base import config, decisions
from deepytorch_core.guard import Candidate, Trial

NAME = "channels_last"
# Share of the parameters that belong to 2-D convolutions, from which on the layout matters.
LEAST_SHARE = 0.2
BUDGET_S = 30.0


def why_not(model: nn.Module) -> str | None:
    """Why the layout of this model's inputs is left alone, or None."""
    own = [parameter.numel() for parameter in model.parameters()]
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    share = sum(convolution.weight.numel() for convolution in convolutions) / max(1, sum(own))
    if share < LEAST_SHARE:
        return f"{share:.0%} of the parameters are 2-D convolutions"
    if any(
        hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh")
        for parameter in model.parameters()
    ):
        return "its parameters are sharded, so a step of one rank can't be tried"
    weights = [convolution.weight for convolution in convolutions]
    if any(
        w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous()
        for w in weights
    ):
        return "it is in channels_last already"
    if any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        for parameter in model.parameters()
    ):
        # An optimizer that steps within the backward pass, for one.
        return "somebody has hooks on its gradients, so a step can't be tried"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm communicates, so a step can't be tried"
    return None


def is_convolutional(model: nn.Module) -> bool:
    """Whether the policy has anything to say about the model."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


class ChannelsLast:
    """The layout in place: of every 4-D input, which convolutions hand on.

    Args:
        model: gets a hook.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._handle: Any = None

    def apply(self) -> None:
        """Switch to channels_last. A second call does nothing."""
        model = self._model()
        if self._handle is None and model is not None:
            self._handle = model.register_forward_pre_hook(_convert_inputs, with_kwargs=True)

    def undo(self) -> None:
        """Switch back. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def is_on(self) -> bool:
        """Whether inputs are converted."""
        return self._handle is not None


def _laid_out(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def _apart(value: Any) -> Any:
    """A copy whose gradient goes nowhere, and that the model may change in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad).clone()
    return value


def _convert_inputs(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tree_map(_laid_out, args), tree_map(_laid_out, kwargs)


def choose(model: nn.Module, *, mode: str = "auto") -> Callable[[], None]:
    """Have the layout decided at the model's first training step; returns what undoes it.

    The choice is this rank's own.

    Args:
        model: before or after it is wrapped in DistributedDataParallel.
        mode: "auto" tries it on the first batch; "on" switches now, without measuring; "off" does
            nothing.
    """
    layout = ChannelsLast(model)
    reason = "kernels=off" if mode == "off" else why_not(model)
    what = f"memory format of {type(model).__name__}"
    if reason is not None:
        decisions.record(what, guard.STOCK, reason)
        return layout.undo
    if mode == "on":
        layout.apply()
        decisions.record(what, NAME, "kernels=on")
        return layout.undo
    handle = model.register_forward_pre_hook(_FirstBatch(what, layout), with_kwargs=True)

    def undo() -> None:
        handle.remove()
        layout.undo()

    return undo


class _FirstBatch:
    """A forward pre-hook that decides at the first call with gradients, and then does nothing."""

    def __init__(self, what: str, layout: ChannelsLast) -> None:
        self._what = what
        self._layout: ChannelsLast | None = layout

    def __reduce__(self) -> Any:
        return _FirstBatch._done, ()  # a copy of the model is not measured

    @staticmethod
    def _done() -> Callable[..., None]:
        return _nothing

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._layout is None or not (model.training and torch.is_grad_enabled()):
            return None
        layout, self._layout = self._layout, None
        # A framework may have sharded or flattened it since.
        reason = why_not(model)
        if reason is not None:
            decisions.record(self._what, guard.STOCK, reason)
            return None

        def run() -> Any:
            # The forward alone: hooks, ours among them, and wrappers are not what is tried.
            given = tree_map(_apart, (args, kwargs))
            given = _convert_inputs(model, *given) if layout.is_on else given
            outputs = tree_leaves(model.forward(*given[0], **given[1]))
            found = [
                output
                for output in outputs
                if isinstance(output, torch.Tensor) and output.requires_grad
            ]
            torch.autograd.backward([output.float().square().mean() for output in found])
            return [output.detach() for output in found]

        kind = next(model.parameters()).device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        candidate = Candidate(NAME, layout.apply, layout.undo)
        # Eager steps can be too busy launching to show what their convolutions take on the GPU.
        is_compiled = kind == "cuda" and config.current().compile != "off"
        trial = Trial(
            module=model,
            run=run,
            dtype=autocast,
            budget_s=BUDGET_S,
            clock=functools.partial(_clock_for, model) if is_compiled else None,
        )
        shapes = [list(leaf.shape) for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        prefer = "it is the layout of compiled convolutions" if is_compiled else None
        facts = {"shapes": shapes}
        guard.choose(self._what, [candidate], trial, facts=facts, prefer=prefer)
        return _convert_inputs(model, args, kwargs) if layout.is_on else None


def _clock_for(model: nn.Module, call: Callable[[], object], ranks: guard.Ranks) -> guard.Clock:
    from deepytorch_core.guard import gpu_time  # importing it takes seconds

    return gpu_time.clock_for(model, call, ranks)


def _nothing(model: nn.Module, args: Any, kwargs: Any) -> None:
    return None
