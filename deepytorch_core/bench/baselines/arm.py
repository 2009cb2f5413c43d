"""An arm of a row that a baseline of `PEER_MEMORY` makes ready."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepytorch_core.bench.ops import Buffers
    from deepytorch_core.bench.rivals import Call
    from deepytorch_core.bench.rows import Row


@dataclass(frozen=True)
class TimedArm:
    """One arm of a row: its call, the call's buffers, and which of its ways it is ("": the one)."""

    call: "Call"
    buffers: "Buffers"
    way: str = ""


Prepare = Callable[["Row"], TimedArm]
"""Makes an arm of a row ready. All ranks take part."""

Measure = Callable[["Call"], float]
"""About how long a call takes, the way the run times calls; equal on all ranks, which take part."""
