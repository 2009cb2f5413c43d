"""Turns of processes: two arms that are processes of their own and run one after the other."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from deepytorch_core.bench.job import Run


class Turns:
    """Lets all processes of both arms go through the blocks one by one, over the store."""

    def __init__(self, store: Store, job: Run) -> None:
        self._store = store
        self._limit = timedelta(seconds=job.timeout_s)
        self._num_ranks = job.world_size

    def finished(self, turn: str) -> None:
        """Say that this process is done with its part of `turn`."""
        if self._store.add(f"turn/{turn}/count", 1) == self._num_ranks:
            self._store.set(f"turn/{turn}/done", "1")

    def wait(self, turn: str) -> None:
        """Sleep until all ranks of the arm whose `turn` it is have finished it."""
        self._store.wait([f"turn/{turn}/done"], self._limit)
