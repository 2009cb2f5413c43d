"""Whether weights have changed since something was to be computed from them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Steps:
    """Counts optimizer steps; a parameter's version does not: fused kernels leave it as it is.

    To be registered with `register_optimizer_step_post_hook`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.watching: weakref.WeakSet[Changes] = weakref.WeakSet()

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1
        held = _held_by(optimizer) if self.watching else set()
        for one in list(self.watching):
            one.stepped(optimizer, held)


steps = Steps()
"""The process's: logits can't be computed any more after a step that changes what makes them."""


class Changes:
    """Counts the optimizer steps that may have changed some weights.

    Any step may, as an optimizer may hold copies that stand for them: until one has stepped that
    holds all of those that are trained. Then others' steps don't count.

    Args:
        parameters: gives the weights.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.count = 0
        self._parameters = parameters
        self._owner: Callable[[], Any] = lambda: None
        steps.watching.add(self)

    def stepped(self, optimizer: Any, held: set[int]) -> None:
        """Take note of a step of an optimizer, which holds the tensors of these ids."""
        ours = list(self._parameters())
        trained = {id(one) for one in ours if one.requires_grad}
        if any(id(one) in held for one in ours):
            self.count += 1
            is_owner = bool(trained) and trained <= held
            self._owner = weakref.ref(optimizer) if is_owner else lambda: None
            return
        owner = self._owner()
        is_owned = owner is not None and trained <= _held_by(owner)
        if trained and not is_owned:
            self.count += 1


def _held_by(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(one) for group in groups for one in group["params"]}


def too_late() -> RuntimeError:
    """The error of who reads logits after the weights that they come from."""
    return RuntimeError(
        "the logits of this training step were left out, and can't be computed any more: the "
        "weights have changed since or are sharded. Read them before optimizer.step(), or switch "
        "kernels off (kernels=off, DEEPYTORCH_KERNELS=off)"
    )
