"""How many tokens a pass of the trunk may have that several micro-batches share.

The option `tokens_per_step` fixes it, or it is found out from memory and times. The memory is what
a micro-batch's pass takes, and what is free. The times are of a few steps before and after passes
are shared.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from deepytorch_core import guard
from deepytorch_core.base import config

WHAT = "passes of micro-batches"

MOST_TOKENS = 16_384
"""A GPU is full with fewer; beyond, a pass only takes more memory."""
# Steps of each way that are timed; the first ones of the shared way, which captures, are not.
TIMED_STEPS, UNTIMED_STEPS = 4, 3
# Sizes of shared passes are captured and compiled as they come, so the shared way has more steps.
MOST_TIMED_STEPS = 32
# Shared passes may take this part of the free memory. Their backward pass is not made again.
_SHARE_OF_MEMORY = 0.6
# Times of so few steps tell no smaller loss from noise.
_LOSS = 1.03


class StepTokens(NamedTuple):
    """An optimizer step's tokens, and those of its largest micro-batch and of its largest pass."""

    num_tokens: int
    most_tokens: int
    most_of_pass: int


class Fixed:
    """A budget that somebody has set; `tokens` of a pass, less where memory was lacking."""

    problem: str | None = None
    times_ms: dict[str, float] | None = None

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is found out."""
        return True

    def note(self, step: StepTokens | None) -> None:
        """A step begins; the last one was that."""

    def lacked(self, tokens: int) -> None:
        """There was no memory for a pass of so many."""
        self.tokens = min(self.tokens, tokens) // 2


class Measured(Fixed):
    """A budget for a GPU: none at first, then what memory allows, and it stays if it is faster.

    An earlier run of the same model may have found that out. Then nothing is timed.

    Args:
        device: the GPU.
        key: of the profile's entry.

    Attributes:
        problem: why micro-batches keep passes of their own, once that is known.
        times_ms: of a thousand tokens, apart and merged, once both are known; none of this run
            where the profile has them.
    """

    def __init__(self, device: torch.device, key: dict[str, Any]) -> None:
        super().__init__(0)
        self._device = device
        self._key = key
        is_asked_anew = config.current().tune == "force"
        known = None if is_asked_anew else guard.profile.find(key)
        self._is_known = known is not None
        # Memory of a token in a shared pass, in bytes; None until such passes have shown it.
        self._token_bytes: float | None = (known or {}).get("token_bytes")
        self._limit = MOST_TOKENS
        self._most_tokens = self._most_of_pass = 0
        self._apart: list[float] = []
        self._merged: list[float] = []
        self._num_untimed = UNTIMED_STEPS
        self._began: float | None = None
        if not self._is_known and (reason := guard.why_not_measured()) is not None:
            self.problem = f"not measured: {reason}"

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
        if step is None or step.num_tokens == 0:
            return
        self._most_tokens = max(self._most_tokens, step.most_tokens)
        self._most_of_pass = max(self._most_of_pass, step.most_of_pass)
        if self._is_known:
            self._share()
            self.times_ms = {} if self.problem is None else None
        elif began is not None:
            self._time((now - began) / step.num_tokens)

    def _time(self, seconds: float) -> None:
        """Take the time of a token of the last step."""
        if self.tokens == 0:
            self._apart.append(seconds)
            if len(self._apart) == TIMED_STEPS:
                self._share()
        elif self._num_untimed:
            self._num_untimed -= 1
            if self._num_untimed == 0:
                self._share_more()
        else:
            self._merged.append(seconds)
            if len(self._merged) >= TIMED_STEPS:
                self._judge(is_last=len(self._merged) == MOST_TIMED_STEPS)

    def _share(self) -> None:
        """Begin with what the largest micro-batch took; rows were padded then, or are yet."""
        token_bytes = self._token_bytes or self._taken_bytes() / self._most_tokens
        free = self._free_tokens(token_bytes)
        self.tokens = min(self._limit, free)
        if self.tokens < 2 * self._most_tokens:
            why = "memory is lacking for a pass of several" if free == self.tokens else None
            self.tokens = 0
            self.problem = why or f"each has up to {self._most_tokens} tokens, which fill a GPU"

    def _share_more(self) -> None:
        """Go on with what shared passes took."""
        if self._most_of_pass > self._most_tokens:
            self._token_bytes = self._taken_bytes() / self._most_of_pass
            self.tokens = max(self.tokens, min(self._limit, self._free_tokens(self._token_bytes)))

    def lacked(self, tokens: int) -> None:
        """There was no memory for a pass of so many."""
        super().lacked(tokens)
        self._limit = self.tokens

    def _taken_bytes(self) -> int:
        """Bytes that the largest pass took at most."""
        there = torch.cuda.memory_allocated(self._device)
        return max(1, torch.cuda.max_memory_allocated(self._device) - there)

    def _free_tokens(self, token_bytes: float) -> int:
        """For how many tokens of a pass there is memory."""
        free, _ = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        room = free + reserved - torch.cuda.memory_allocated(self._device)
        return int(_SHARE_OF_MEMORY * room / token_bytes)

    def _judge(self, *, is_last: bool) -> None:
        """Shared passes stay once some steps in a row are no slower, and go if none ever were."""
        apart, merged = guard.median(self._apart), guard.median(self._merged[-TIMED_STEPS:])
        is_slower = merged > _LOSS * apart
        if is_slower and not is_last:
            return
        self.times_ms = {"apart": apart * 1e6, "merged": merged * 1e6}
        if is_slower:
            self.tokens, self.problem = 0, "passes of their own are faster"
        elif config.local_rank() == 0:
            found = {"chosen": "merged", "reason": "faster", "times_ms": self.times_ms}
            guard.profile.keep(self._key, {**found, "token_bytes": self._token_bytes})


def measured(model: torch.nn.Module, device: torch.device) -> Measured:
    """The budget of passes of the model's trunk, as its own steps or an earlier run tell it."""
    facts = {"module": guard.fingerprint(model)}
    key = guard.profile.key(f"{WHAT} of {type(model).__name__}", facts, world_size=1)
    return Measured(device, key)
