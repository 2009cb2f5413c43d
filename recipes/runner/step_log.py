# SPDX-License-Identifier: Apache-2.0
"""Exchanges what all ranks tell of every step, read without keeping a GPU waiting."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepytorch.recipes.base.run import Process
from deepytorch.recipes.runner.trainer import StepResult


@dataclass(frozen=True)
class LoggedStep:
    """One step, alike on all ranks."""

    step: int
    loss: float
    end: bool  # whether a rank was told to end
    num_units: float  # tokens or images of all ranks
    learning_rate: float
    seconds: float


@dataclass(frozen=True)
class _Sent:
    """A step whose numbers the device may not have computed yet."""

    step: int
    learning_rate: float
    numbers: torch.Tensor  # on the CPU: loss, how many ranks were told to end, units
    arrived: torch.cuda.Event | None


class Telling:
    """Steps' numbers, each read once.

    Reading waits for the device. On a GPU a step is therefore read when the next one has been
    launched: the GPU always has work, and who is told to end does so one step later.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lag = 1 if process.device.type == "cuda" else 0
        self._sent: deque[_Sent] = deque()
        self._since = 0.0

    def begin(self) -> None:
        """A step begins; where earlier ones are on their way they are what it is timed from."""
        if not self._sent:
            self._since = time.perf_counter()

    def add(self, step: int, result: StepResult, *, end: bool) -> None:
        """Collective: one all_reduce for the loss and for whether any rank was told to end."""
        device = self._process.device
        shared = torch.stack([result.loss_share, torch.full((), float(end), device=device)])
        dist.all_reduce(shared)
        numbers = torch.cat([shared, result.num_units.reshape(1)])
        arrived = None
        if device.type == "cuda":
            # Now, as a copy that is asked for later would wait for what is launched by then.
            numbers = torch.empty(3, pin_memory=True).copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._sent.append(_Sent(step, result.learning_rate, numbers, arrived))

    def read(self, *, everything: bool) -> Iterator[LoggedStep]:
        """The steps that can be read by now, in their order; or, waiting for them, all."""
        while len(self._sent) > (0 if everything else self._lag):
            sent = self._sent.popleft()
            if sent.arrived is not None:
                sent.arrived.synchronize()
            loss, end, num_units = sent.numbers.tolist()
            now = time.perf_counter()
            seconds, self._since = now - self._since, now
            yield LoggedStep(sent.step, loss, bool(end), num_units, sent.learning_rate, seconds)
