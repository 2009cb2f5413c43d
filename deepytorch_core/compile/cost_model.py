"""Whether a run lasts long enough to earn back what compiling its model takes of it."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from deepytorch_core.compile import regions

# Seconds that the training waits: for a few blocks, and for each module with parameters that torch
# has to look at. Measured on H100 and H200: 34 to 46 s for ResNet-50's 107 modules, 126 to 159 s
# for a UNet's 391. Where helpers compile it graphs are captured and loaded, of that UNet in 28 s.
LEAST_COST_S = 20.0
LEAST_HELPED_COST_S = 0.5
COST_OF_MODULE_S = 0.4
COST_OF_HELPED_MODULE_S = 0.07
# A model is looked at again once its run has lasted so many times longer.
_AGAIN = 1.05
LARGEST_SHARE = 0.03  # of the time that a run has lasted, or is known to last, for trials


class RunLength:
    """How long the run lasts, as far as is known; told when each of its steps begins.

    `steps` is how many there will be, where its framework says so.
    """

    def __init__(self) -> None:
        self.steps: int | None = None
        self._first: float | None = None
        self._last = 0.0
        self._fastest_s = math.inf

    def note(self, now: float) -> None:
        """A step begins at `now`, in seconds."""
        if self._first is None:
            self._first = now
        else:
            self._fastest_s = min(self._fastest_s, now - self._last)
        self._last = now

    def lasts_s(self, now: float) -> float:
        """Seconds it has lasted by `now`, or is known to last by the pace of its fastest step."""
        lasted = now - (now if self._first is None else self._first)
        if self.steps is None or math.isinf(self._fastest_s):
            return lasted
        return max(lasted, self.steps * self._fastest_s)


def cost_s(root: nn.Module, *, is_helped: bool) -> float:
    """Seconds that compiling a model is expected to take of its training."""
    number = sum(regions.num_modules(region.modules[0]) for region in regions.find(root))
    if is_helped:
        return max(LEAST_HELPED_COST_S, COST_OF_HELPED_MODULE_S * number)
    return max(LEAST_COST_S, COST_OF_MODULE_S * number)


def least_run_s(cost: float) -> float:
    """How long a run has to last before trials may take `cost` seconds."""
    return cost / LARGEST_SHARE


class Outlook:
    """Estimates what compiling a model will take. A look takes milliseconds, so it is rare."""

    def __init__(self) -> None:
        self._is_helped = False
        self._due_s = 0.0
        self._least_s: dict[bool, float] = {}

    def is_helped(self, root: nn.Module, lasted_s: float, may_help: Callable[[], bool]) -> bool:
        """Whether helpers can compile `root`, as `may_help` told when it was looked at."""
        if lasted_s >= self._due_s:
            self._least_s.clear()
            self._is_helped = may_help()
            least_s = self.least_run_s(root, is_helped=self._is_helped)
            self._due_s = max(least_s, _AGAIN * lasted_s)
        return self._is_helped

    def least_run_s(self, root: nn.Module, *, is_helped: bool) -> float:
        """Return how long the run has to last before it is compiled."""
        if is_helped not in self._least_s:
            self._least_s[is_helped] = least_run_s(cost_s(root, is_helped=is_helped))
        return self._least_s[is_helped]
