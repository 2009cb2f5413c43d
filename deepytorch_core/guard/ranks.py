"""All ranks come to one answer: what each has found goes round over the rendezvous store."""

from __future__ import annotations

import json
import sys
from typing import Any

from deepytorch_core import agreement

# Others may still compile, or run the step that leads here.
HERE_LIMIT_S = 600.0


class RankMissing(RuntimeError):
    """A rank did not come to decide with the others, who are told on all that have waited."""


class Ranks:
    """The ranks that decide `what` together: those of torch.distributed, or this process alone.

    All of them must make the same calls in the same order. No collective is used, so a rank that
    does not come costs the others a time limit and nothing else.
    """

    def __init__(self, what: str, *, limit_s: float = HERE_LIMIT_S) -> None:
        self._what = what
        self._limit_s = limit_s
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        self._c10d: Any = c10d if c10d is not None and c10d.is_initialized() else None
        self.rank = self._c10d.get_rank() if self._c10d else 0
        self.size = self._c10d.get_world_size() if self._c10d else 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (of JSON's types), by rank; the same list on every rank.

        Raises RankMissing, on every rank that waited, naming the ranks that did not come.
        """
        if self.size == 1:
            return [value]
        store, name = self._c10d._get_default_store(), f"deepytorch/guard/{self._what}"
        try:
            texts = agreement.gather(
                agreement.numbered(store, name, self.rank),
                rank=self.rank,
                size=self.size,
                value=json.dumps(value),
                here_limit_s=self._limit_s,
                what=f"deciding on {self._what}",
            )
        except RuntimeError as error:
            raise RankMissing(str(error)) from error
        return [json.loads(text) for text in texts]

    def first_problem(self, problem: str | None) -> str | None:
        """None if no rank has a problem, else the first one's, with its rank."""
        problems = self.gather(problem)
        for rank, one in enumerate(problems):
            if one is not None:
                return str(one) if self.size == 1 else f"rank {rank}: {one}"
        return None

    def slowest(self, times: dict[str, list[float]]) -> dict[str, list[float]]:
        """The samples as the slowest rank took them; as many of each as every rank has."""
        tables = self.gather(times)
        merged = {}
        for name in times:
            rows = [table[name] for table in tables]
            merged[name] = [max(column) for column in zip(*rows, strict=False)]
        return merged
