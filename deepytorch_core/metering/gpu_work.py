"""The share of the time in which the GPU works, as its driver counts it.

The driver counts the time in which any kernel runs, of whatever process, over about the last
second: `nvidia-smi` shows the same. PyTorch asks it by NVIDIA's library for Python (nvidia-ml-py);
without that nothing is known.
"""

from __future__ import annotations

import sys
import time
from collections import deque

_INTERVAL_S = 1.0
_MOST_SAMPLES = 60


class GpuWork:
    """Samples of this process's current GPU: one a second at most, the last minute's."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_MOST_SAMPLES)
        self._last_s = -_INTERVAL_S
        self._is_known = True

    def sample(self) -> None:
        """Ask the driver, if the last answer is a second old."""
        torch, now = sys.modules.get("torch"), time.monotonic()
        is_used = torch is not None and torch.cuda.is_initialized()
        if not (is_used and self._is_known) or now - self._last_s < _INTERVAL_S:
            return
        self._last_s = now
        assert torch is not None
        try:
            self._samples.append(torch.cuda.utilization() / 100.0)
        except Exception:  # no library, or a part of a GPU, of which the driver counts nothing
            self._is_known = False

    @property
    def share(self) -> float | None:
        """The mean of the last minute's samples, from 0 to 1; None where nothing is known."""
        return sum(self._samples) / len(self._samples) if self._samples else None
