"""All ranks come to one answer: what each has found goes round over the rendezvous store.

NOTE [Nobody waits] `Ranks.ask` is for what is decided in a training's own steps. The steps go on as
they were until the answers are there. So a rank that trains no such model, or no more, keeps the
others from a gain and from nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from deepytorch_core.base import agreement

# Others may still compile, or run the step that leads here.
HERE_LIMIT_S = 600.0


class RankMissing(RuntimeError):
    """A rank did not come to decide with the others, who are told on all that have waited."""


class Ranks:
    """The ranks that decide `what` together: those of torch.distributed, or this process alone.

    Args:
        what: is decided.
        limit_s: after so many seconds a rank that has not come is missing.
        group: the ProcessGroup whose ranks they are; None: of the default one.
        alone: whether this process decides for itself.

    All of them must make the same calls in the same order. No collective is used, so a rank that
    does not come costs the others a time limit and nothing else.
    """

    def __init__(
        self, what: str, *, limit_s: float = HERE_LIMIT_S, group: Any = None, alone: bool = False
    ) -> None:
        self._what = what
        self._limit_s = limit_s
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        is_joined = c10d is not None and c10d.is_initialized() and not alone
        self._c10d: Any = c10d if is_joined else None
        # A script may have ended its groups since it has made this one.
        self._group = group if self._c10d and group in self._c10d._world.pg_map else None
        self.rank = self._c10d.get_rank(self._group) if self._c10d else 0
        self.size = self._c10d.get_world_size(self._group) if self._c10d else 1

    def _store(self) -> Any:
        if self._group is None:
            return self._c10d._get_default_store()
        return self._c10d._world.pg_map[self._group][1]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (of JSON's types), by rank; the same list on every rank.

        Raises RankMissing, on every rank that waited, naming the ranks that did not come.
        """
        if self.size == 1:
            return [value]
        store, name = self._store(), f"deepytorch/guard/{self._what}"
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

    def ask(self, what: str, value: Any) -> Question:
        """Tell the others this rank's `value` (of JSON's types), and wait for nobody.

        Args:
            what: is asked: the same on all ranks, or they train different things.
        """
        if self.size == 1:
            return Question(what, value, None)
        store, name = self._store(), f"deepytorch/guard/{self._what}"
        try:
            asked = agreement.StoreQuestion(
                agreement.numbered(store, name, self.rank),
                rank=self.rank,
                size=self.size,
                value=json.dumps([what, value]),
                here_limit_s=self._limit_s,
            )
        except RuntimeError as error:
            raise RankMissing(str(error)) from error
        return Question(what, value, asked)

    def first_problem(self, problem: str | None) -> str | None:
        """None if no rank has a problem, else the first one's, with its rank."""
        return first_of(self.gather(problem))

    def slowest(self, times: dict[str, list[float]]) -> dict[str, list[float]]:
        """The samples as the slowest rank took them; as many of each as every rank has."""
        return slowest(self.gather(times))


class Question:
    """A question to all ranks; made by `Ranks.ask`."""

    def __init__(self, what: str, value: Any, asked: agreement.StoreQuestion | None) -> None:
        self._what, self._value, self._asked = what, value, asked

    def answers(self) -> list[Any] | None:
        """Every rank's value, by rank: the same list on every rank; None: not there yet.

        Raises RankMissing where a rank did not come, or was asked something else.
        """
        if self._asked is None:
            return [self._value]
        try:
            texts = self._asked.answers()
        except RuntimeError as error:
            raise RankMissing(str(error)) from error
        if texts is None:
            return None
        told = [json.loads(text) for text in texts]
        other = next((rank for rank, (what, _) in enumerate(told) if what != told[0][0]), None)
        if other is not None:
            raise RankMissing(f"rank {other} decides on {told[other][0]}, rank 0 on {told[0][0]}")
        return [value for _, value in told]


def first_of(problems: Sequence[str | None]) -> str | None:
    """None if no rank has a problem, else the first one's, with its rank."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            return problem if len(problems) == 1 else f"rank {rank}: {problem}"
    return None


def slowest(tables: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """All ranks' samples as the slowest rank took them; as many of each as every rank has."""
    merged = {}
    for name in tables[0]:
        rows = [table[name] for table in tables]
        merged[name] = [max(column) for column in zip(*rows, strict=False)]
    return merged
