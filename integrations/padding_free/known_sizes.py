"""Sizes of packed rows go from one run to the next by the profile.

The sizes are chosen by the first batches. Another run of the same data may begin with other ones,
as it knows more. With sizes of its own it would find none of the code that the earlier run has
compiled, and wait for a dozen batches to choose them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from deepytorch_core import guard
from deepytorch_core.base import config
from deepytorch_core.data.shapes import Seen, Shapes

WHAT = "sizes of packed rows"


def resume(model: Any, shapes: Shapes, *, of: str) -> None:
    """Have a model's shapes go by what an earlier run has seen, and keep what this one sees.

    Args:
        model: that the rows are for.
        shapes: of its rows.
        of: what a row holds.
    """
    facts = {"module": guard.fingerprint(model), "rows": of}
    key = guard.profile.key(f"{WHAT} of {type(model).__name__}", facts, world_size=1)

    def keep(seen: Seen) -> None:
        if config.local_rank() == 0:
            guard.profile.keep(
                key, {"chosen": "few", "reason": "first batches", "seen": dataclasses.asdict(seen)}
            )

    shapes.resume(None if config.current().tune == "force" else _found(key), keep)


def _found(key: dict[str, Any]) -> Seen | None:
    known = guard.profile.find(key)
    if known is None:
        return None
    seen = known["seen"]
    return Seen(**{**seen, "num_tokens": tuple(seen["num_tokens"])})
