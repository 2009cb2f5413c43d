"""Whether a round goes on as it began: how fast it is, and what a rank holds."""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepytorch_core.testing.leaks import Holdings, holdings, left_over

if TYPE_CHECKING:
    import torch

_NUM_SPANS = 10  # of a round


@dataclass(frozen=True)
class Held:
    """The measurements that one rank tells of a round.

    Attributes:
        per_s: operations per second, in each tenth of the round.
        left: descriptors, threads and mapped memory that it has at the end and had not in the
            middle, when all kinds of operations had been.
        grown_bytes: growth of its resident memory since the middle.
        gpu_grown_bytes: growth of the memory taken of its GPU.
    """

    per_s: list[float]
    left: list[str]
    grown_bytes: int
    gpu_grown_bytes: int


class Watch:
    """Looks at the clock, and in the middle of the round at what this process holds."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        self._device = device
        self._span_s = seconds / _NUM_SPANS
        self._span = (0, time.monotonic())  # where it began: operations so far, seconds
        self._per_s: list[float] = []
        self._middle: tuple[Holdings, int, int] | None = None

    def look(self, number: int) -> None:
        """`number` operations have ended, and none is under way."""
        before, since = self._span
        now = time.monotonic()
        if now - since < self._span_s:
            return
        self._per_s.append(round((number - before) / (now - since), 1))
        if len(self._per_s) == _NUM_SPANS // 2:
            self._middle = (holdings(), resident_bytes(), _taken_bytes(self._device))
        self._span = (number, time.monotonic())

    def held(self) -> Held:
        if self._middle is None:  # too short a round to tell
            return Held(self._per_s, [], 0, 0)
        before, resident, taken = self._middle
        return Held(
            self._per_s,
            left_over(before),
            resident_bytes() - resident,
            _taken_bytes(self._device) - taken,
        )


def resident_bytes() -> int:
    """Memory of this process alone."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory is no leak, wherever the allocator keeps it
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no line RssAnon")


def _taken_bytes(device: torch.device) -> int:
    """Return what anybody has taken of the GPU; torch's cache is given back first."""
    import torch

    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
