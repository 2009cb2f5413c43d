"""How long the training loop waits for its DataLoaders, for the report and `deepytorch doctor`.

Each fetch of a batch is timed where it happens, in `_BaseDataLoaderIter.__next__`. The first batch
of a pass starts the workers and is left out. It costs two looks at the clock a batch.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from deepytorch_core.base.patching import Patches


@dataclass
class Waits:
    """Totals of the loaders of the same settings: seconds between batches, and those of them that
    were spent waiting for the next one."""

    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    batches: int = 0
    elapsed_s: float = 0.0
    waited_s: float = 0.0


_known: dict[tuple[Any, ...], Waits] = {}


def report() -> tuple[dict[str, Any], ...]:
    """Plain values, one entry for all loaders of the same settings."""
    return tuple(dataclasses.asdict(waits) for waits in _known.values() if waits.batches)


def waited_s() -> float:
    """Seconds that all of them were waited for."""
    return sum(waits.waited_s for waits in _known.values())


_WHY = "the report tells how long data was waited for"


def install(module: ModuleType, patches: Patches) -> None:
    """Time the loaders of `torch.utils.data.dataloader`."""
    patches.replace(module._BaseDataLoaderIter, "__next__", _timed, why=_WHY)


def _timed(original: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(self: Any) -> Any:
        asked = time.monotonic()
        batch = original(self)  # raises StopIteration at the end of a pass
        came = time.monotonic()
        before: float | None = getattr(self, "_deepytorch_came", None)
        self._deepytorch_came = came
        if before is not None:
            waits = _of(self)
            waits.batches += 1
            waits.elapsed_s += came - before
            waits.waited_s += came - asked
        return batch

    return fetch


def _of(iterator: Any) -> Waits:
    settings = (
        int(iterator._num_workers),
        bool(iterator._pin_memory),
        getattr(iterator, "_prefetch_factor", None),
        bool(getattr(iterator, "_persistent_workers", False)),
    )
    found = _known.get(settings)
    if found is None:
        found = _known[settings] = Waits(*settings)
    return found


os.register_at_fork(after_in_child=_known.clear)  # a child's report tells of its own loaders
