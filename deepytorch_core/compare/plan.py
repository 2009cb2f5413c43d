"""Says what one run of the script does: each of its processes reads it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_BLOCKS = 10
MIN_STEPS = 4
_WARMUP_SHARE = 5
PROFILED_STEPS = 4
WARMED_STEPS = 1
"""The profiler sees so many steps before those, as the first pays for its setup."""
UNTIMED_STEPS = WARMED_STEPS + PROFILED_STEPS


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of the script under one arm.

    Args:
        steps: optimizer steps after which all ranks stop.
        folder: where each rank writes what it measured, as rank<N>.json.
        workspace: the copy-on-write view of the script's folder, where it runs.
        outside: where weights go that would be written over older ones elsewhere, and journals of
            what is made elsewhere.
        began: when the comparison did, in seconds since the epoch: what is older is the user's.
        seed: random numbers begin here, unless the script seeds them itself.
        warmup_steps: untimed steps at the beginning; 0: a fifth of all.
        settings: what of `deepytorch_core.tune.knobs` is set; None: as the profile says.
        is_nudged: whether the weights are moved by rounding after the first step; see `nudge`.
        is_redrawn: whether the random generators begin anew then, too.
        seconds: after how many seconds since the first step the run may end, at a step's end;
            `steps` is then the most. For one process alone. None: after the steps.
        is_clocked: whether every step is timed and the last few are profiled; see `clock`.
        is_profiled: whether the last few are, after those that are timed in blocks.
    """

    steps: int
    folder: str
    workspace: str
    outside: str
    began: float
    seed: int = 0
    warmup_steps: int = 0
    settings: dict[str, int] | None = None
    is_nudged: bool = False
    is_redrawn: bool = False
    seconds: float | None = None
    is_clocked: bool = False
    is_profiled: bool = False

    @property
    def warmup(self) -> int:
        """Untimed steps at the beginning."""
        return self.warmup_steps or max(1, self.steps // _WARMUP_SHARE)

    @property
    def block_ends(self) -> tuple[int, ...]:
        """After which steps the timed blocks end; the first begins after the warm-up."""
        timed = self.steps - self.warmup - (UNTIMED_STEPS if self.is_profiled else 0)
        blocks = max(1, min(MAX_BLOCKS, timed))
        return tuple(self.warmup + timed * (number + 1) // blocks for number in range(blocks))

    def write(self, path: Path) -> None:
        """Put the plan where the processes of the run read it."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """The plan that `write` wrote."""
        values: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**values)
