"""How many tokens a pass of the trunk may have that several micro-batches share.

The option `tokens_per_step` fixes it, or it is found out from memory and times. The memory is what
a micro-batch's pass takes, and what is free. The times are of a few steps before and after passes
are shared.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from deepytorch_core import guard

MOST_TOKENS = 16_384
"""A GPU is full with fewer; beyond, a pass only takes more memory."""
# Steps of each way that are timed; the first ones of the shared way, which captures, are not.
TIMED_STEPS, UNTIMED_STEPS = 4, 3
# Shared passes may take this part of the free memory. Their backward pass is not made again.
_SHARE_OF_MEMORY = 0.6
# Times of so few steps tell no smaller loss from noise.
_LOSS = 1.03


class StepTokens(NamedTuple):
    """An optimizer step's tokens, and those of its largest micro-batch."""

    num_tokens: int
    most_tokens: int


class Fixed:
    """A budget that somebody has set; `tokens` of a pass, less where memory was lacking."""

    problem: str | None = None
    times_ms: dict[str, float] | None = None

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def note(self, step: StepTokens | None) -> None:
        """A step begins; the last one was that."""

    def lacked(self, tokens: int) -> None:
        """There was no memory for a pass of so many."""
        self.tokens = min(self.tokens, tokens) // 2


class Measured(Fixed):
    """A budget for a GPU: none at first, then what memory allows, and it stays if it is faster.

    Args:
        device: the GPU.

    Attributes:
        problem: why micro-batches keep passes of their own, once that is known.
        times_ms: of a thousand tokens, apart and merged, once both are known.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(0)
        self._device = device
        self._most_tokens = 0
        self._apart: list[float] = []
        self._merged: list[float] = []
        self._num_untimed = UNTIMED_STEPS
        self._began: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is found out."""
        return self.problem is not None or self.times_ms is not None

    def note(self, step: StepTokens | None) -> None:
        """A step begins; the last one was that, or None if its time tells nothing."""
        if self.is_settled:
            return
        guard.synchronize(self._device)
        now, began = time.perf_counter(), self._began
        self._began = now
        if step is None or began is None or step.num_tokens == 0:
            return
        self._most_tokens = max(self._most_tokens, step.most_tokens)
        seconds = (now - began) / step.num_tokens
        if self.tokens == 0:
            self._apart.append(seconds)
            if len(self._apart) == TIMED_STEPS:
                self._share()
        elif self._num_untimed:
            self._num_untimed -= 1
        else:
            self._merged.append(seconds)
            if len(self._merged) == TIMED_STEPS:
                self._judge()

    def _share(self) -> None:
        free = self._free_tokens()
        self.tokens = min(MOST_TOKENS, free)
        if self.tokens < 2 * self._most_tokens:
            why = "memory is lacking for a pass of several" if free == self.tokens else None
            self.tokens = 0
            self.problem = why or f"each has up to {self._most_tokens} tokens, which fill a GPU"

    def _free_tokens(self) -> int:
        """For how many tokens there is memory, by what the largest micro-batch took at most."""
        free, _ = torch.cuda.mem_get_info(self._device)
        there = torch.cuda.memory_allocated(self._device)
        pass_bytes = torch.cuda.max_memory_allocated(self._device) - there
        room = free + torch.cuda.memory_reserved(self._device) - there
        return int(_SHARE_OF_MEMORY * room * self._most_tokens / max(1, pass_bytes))

    def _judge(self) -> None:
        apart, merged = guard.median(self._apart), guard.median(self._merged)
        self.times_ms = {"apart": apart * 1e6, "merged": merged * 1e6}
        if merged > _LOSS * apart:
            self.tokens, self.problem = 0, "passes of their own are faster"
