"""The model that is compiled, and what was asked for it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from deepytorch_core import guard
from deepytorch_core.compile import ahead, capture, graph_trial, regions

RANKS_LIMIT_S = 120.0
_CODE = "compiled code"  # that wants few sizes


class Subject:
    """One model, the same for all phases.

    Its arguments are those of `Compilation`.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str,
        *,
        budget_s: float,
        steps: int | None,
        is_patient: bool,
        group: Any,
    ) -> None:
        self.policy = policy
        self.budget_s = budget_s
        self.steps = steps
        self.is_patient = is_patient and steps is None
        self._root_of = weakref.ref(regions.unwrapped(model))
        self._group = weakref.ref(group) if group is not None else lambda: None
        self.what = f"compile of {type(self.root).__name__}"
        """The name of the decision."""

    @property
    def root(self) -> Any:
        """The model inside its wrappers; not kept, as it is what calls this."""
        return self._root_of()

    @property
    def device(self) -> torch.device:
        """The place of its parameters."""
        return next((parameter.device for parameter in self.root.parameters()), torch.device("cpu"))

    def ranks(self, what: str = "") -> guard.Ranks:
        """Those of now: a script may end its process group, or make another, meanwhile."""
        return guard.Ranks(what or self.what, limit_s=RANKS_LIMIT_S, group=self._group())

    def may_capture(self) -> bool:
        """Whether its passes are to be tried as CUDA graphs."""
        return graph_trial.is_wanted(self.policy, self.device, steps=self.steps)

    def may_help(self) -> bool:
        """Whether helpers can compile it, as far as this rank knows."""
        return ahead.may_help(self.root, self.device, num_ranks=self.ranks().size)

    def want_few_sizes(self, is_on: bool) -> None:
        """Have its batches filled up to a few sizes for compiled code, or no longer."""
        capture.use_few_sizes(self.root, is_on, by=_CODE)
