"""A GradScaler's step that doesn't wait for the GPU, for fused optimizers switched in by us.

After a backward pass in float16 a GradScaler asks the GPU whether a gradient overflowed, and skips
the optimizer's step if so. All that it launches next comes late by that wait. The fused kernels of
torch can be handed the answer where it is, on the GPU, and then change nothing.

NOTE [Overflow]. torch does that by itself for who asks for `fused=True`, and tells everybody by
`_step_supports_amp_scaling`, on which some trainers refuse to clip gradients. And the step is then
called each time, so that what counts steps by that would go on where stock does not: Accelerate's
schedulers, hooks. So a switched optimizer does not offer it. Its gradients are unscaled as in
stock, and the wait is left out only where nobody looks whether a step is skipped.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from deepytorch_core.base.patching import Patches

_FOLDER = os.path.dirname(hooks.__file__)
# Hooks of these modules on steps may see one too many.
_OWN = ("deepytorch_core.nn.", "deepytorch_core.metering.step_timer", "deepytorch.integrations.")

_optimizers: weakref.WeakKeyDictionary[Optimizer, Callable[[], bool]]
_optimizers = weakref.WeakKeyDictionary()
_patches = Patches()


class ScalerHandle:
    """Has scalers hand `optimizer`, one of torch's, what they found, until `remove`.

    Args:
        optimizer: see above.
        is_fused: whether its next step is a fused one for every parameter group.
    """

    def __init__(self, optimizer: Optimizer, is_fused: Callable[[], bool]) -> None:
        global _patches
        if not _optimizers:
            _patches.undo()  # those that went without a word
            _patches = Patches()
            _patches.replace(
                GradScaler,
                "_maybe_opt_step",
                _without_wait,
                why="fused optimizers get what a scaler found without a wait for the device",
                option="DEEPYTORCH_KERNELS=off",
            )
        _optimizers[optimizer] = is_fused
        self._optimizer = weakref.ref(optimizer)

    def remove(self) -> None:
        """Have them wait again."""
        optimizer = self._optimizer()
        if optimizer is not None:
            _optimizers.pop(optimizer, None)
        # Those that go in this very moment still count in its length.
        if next(iter(_optimizers), None) is None:
            _patches.undo()


def _without_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_step(
        scaler: GradScaler, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        found = list(state["found_inf_per_device"].values())
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        is_plain = len(found) == 1 and found[0].dim() == 0  # that of sharded gradients is not
        if given or not is_plain or optimizer not in _optimizers or _needs_stock(optimizer):
            return original(scaler, optimizer, state, *args, **kwargs)
        # The kernels ask for a one; somebody may have added up what ranks found.
        optimizer.found_inf = (found[0] != 0).to(found[0].dtype)
        try:
            return optimizer.step()
        finally:
            del optimizer.found_inf

    return maybe_step


def _needs_stock(optimizer: Optimizer) -> bool:
    """Whether a parameter group has another form, or somebody may go by which steps are made."""
    if not _optimizers[optimizer]():
        return True
    if not _is_torchs(vars(optimizer).get("step", type(optimizer).step)):
        return True
    found: list[Any] = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *hooks._global_optimizer_pre_hooks.values(),
        *hooks._global_optimizer_post_hooks.values(),
    ]
    return not all(str(getattr(hook, "__module__", None)).startswith(_OWN) for hook in found)


def _is_torchs(step: Any) -> bool:
    """Whether torch alone has wrapped it: learning rate schedulers only note that it was called."""
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_FOLDER):
            return False
        step = getattr(step, "__wrapped__", None)
    return True
