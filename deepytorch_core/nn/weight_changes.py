"""Whether weights may have changed since something was to be computed from them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from deepytorch_core.base.console import say_once


class Steps:
    """Knows which optimizers have stepped, and when; a parameter's version does not tell: fused
    kernels leave it as it is.

    To be registered with `register_optimizer_step_post_hook`. A step costs next to nothing: its
    possible changes are found out when somebody asks.

    Attributes:
        count: of steps so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last: dict[int, tuple[weakref.ref[Any], int]] = {}  # by the optimizer's id
        self._last_of_gone = 0

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1
        key = id(optimizer)
        known = self._last.get(key)
        if known is not None and known[0]() is not optimizer:
            self._last_of_gone = max(self._last_of_gone, known[1])
        self._last[key] = (weakref.ref(optimizer), self.count)

    def may_have_changed(self, weights: Iterable[torch.Tensor], *, since: int) -> bool:
        """Whether a step after number `since` may have changed any of these weights.

        Any may, as an optimizer may hold copies that stand for them, unless one that has stepped
        holds all of those that are trained. Then others' steps don't count.
        """
        if self.count == since:
            return False
        self._forget_gone()
        if self._last_of_gone > since:
            return True
        ours = list(weights)
        trained = {id(weight) for weight in ours if weight.requires_grad}
        held = [(_held_by(optimizer()), last) for optimizer, last in self._last.values()]
        if any(
            last > since and any(id(weight) in theirs for weight in ours) for theirs, last in held
        ):
            return True
        return bool(trained) and not any(trained <= theirs for theirs, _ in held)

    def _forget_gone(self) -> None:
        for key, (optimizer, last) in list(self._last.items()):
            if optimizer() is None:
                self._last_of_gone = max(self._last_of_gone, last)
                del self._last[key]


steps = Steps()
"""The process's: logits can't be computed any more after a step that changes what makes them."""


def _held_by(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}


def too_late() -> RuntimeError:
    """The error of who reads logits after the weights that they come from."""
    return RuntimeError(
        "the logits of this training step were left out, and can't be computed any more: the "
        "weights have changed since or are sharded. Read them before optimizer.step(), or switch "
        "kernels off (kernels=off, DEEPYTORCH_KERNELS=off)"
    )


def say_late() -> None:
    """The same for who has not asked for it, and gets the logits of the weights as they are."""
    say_once(
        "logits of a training step are read for the first time, after optimizer.step(): these are "
        "computed with the new weights, those of later steps as ever",
        level="warning",
    )
