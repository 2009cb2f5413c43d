"""The steps of one model's training: their number, and the time and tokens of the last one."""

from __future__ import annotations

import math
import time
from typing import Any

from deepytorch_core.compile import cost_model, turns


class StepCount:
    """Told of each step as it begins.

    Attributes:
        number: of the step, from 0; -1 before the first.
        is_whole: whether nothing but its forward pass has run since the step began.
        tokens: the size of its batch.
        is_uniform: whether all batches so far were of one size.
        run_length: how long the run lasts, as far as is known.
    """

    def __init__(self) -> None:
        self.number = -1
        self.is_whole = True
        self.tokens = 1
        self.is_uniform = True
        self.run_length = cost_model.RunLength()
        self._began = time.perf_counter()
        self._num_made = 0

    def begin(self, num_made: int) -> None:
        """A step begins, with so many pieces of code and graphs made before."""
        self._num_made = num_made
        self._began = time.perf_counter()
        self.run_length.note(self._began)

    def receive(self, args: Any, kwargs: Any) -> None:
        """The forward pass of the step that begins gets these arguments."""
        before = self.tokens
        self.tokens, self.is_whole = turns.tokens_in(args, kwargs), True
        self.is_uniform &= self.number <= 0 or self.tokens == before

    def seconds(self, num_made: int) -> float:
        """Seconds of the step that is over; infinite where they say nothing of a usual one.

        `num_made`: how many pieces of code and graphs there are now. New ones take their time.
        """
        seconds = time.perf_counter() - self._began
        return seconds if self.is_whole and num_made == self._num_made else math.inf

    def pace(self) -> tuple[float, float]:
        """Seconds since the last step began, and those that the run has lasted or will last."""
        now = time.perf_counter()
        return now - self._began, self.run_length.lasts_s(now)
