"""A rank that an adapter is not used on, while the adapter of other ranks waits for it.

A framework's configuration says on each rank whether an adapter has work there. Where it says so on
some ranks only, those would wait for the others in the adapter, and the others for them in the
framework. So a rank without it leaves word where the adapter's ranks exchange theirs
(`integrations/common/contract.py:join`), and looks whether any of them is there. If one is, all
ranks have the same error.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from deepytorch_core.base import agreement, stores
from deepytorch_core.base.errors import OFF_SWITCH, IntegrationError

DECLINES = "declines"
"""The one name in a non-participant's statement, with the reason; the key that is set then."""
JOINS = "joins"
"""The key that a rank sets before it waits for the others."""

# A rank that comes later finds the word that was left; the framework waits for it anyway.
_MEET_LIMIT_S = 20.0
_C10D = "torch.distributed.distributed_c10d"


class NonParticipant:
    """While open, around what a framework does on this rank without the adapter.

    Raises IntegrationError where another rank has joined: from `meet`, or instead of the error that
    the framework comes to.

    Args:
        adapter: its name in `join`.
        reason: what keeps this rank from joining, as in "rank 1 has ...".
    """

    def __init__(self, adapter: str, reason: str) -> None:
        self._adapter = adapter
        self._reason = reason
        self._own: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._own is not None and isinstance(error, Exception):
            if isinstance(error, IntegrationError):
                return
            self._refuse(error)

    def meet(self, *, waits: bool) -> None:
        """Leave word, and look for ranks that join. Does nothing before the ranks are connected.

        Args:
            waits: whether all ranks come here, so that it is no loss to wait for them.
        """
        c10d = sys.modules.get(_C10D)
        if self._own is not None or c10d is None or not c10d.is_initialized():
            return
        rank, size = c10d.get_rank(), c10d.get_world_size()
        if size == 1:
            return
        with contextlib.suppress(RuntimeError):  # a store that fails is the framework's to tell of
            store = c10d._get_default_store()
            self._own = agreement.numbered(store, f"deepytorch/{self._adapter}", rank)
            self._own.set(str(rank), json.dumps({DECLINES: self._reason}))
            self._own.set(DECLINES, "1")
            everyone = [str(other) for other in range(size)]
            stores.poll(
                lambda: self._own.check([JOINS]) or self._own.check(everyone),
                _MEET_LIMIT_S if waits else 0,
            )
        self._refuse(None)

    def _refuse(self, cause: Exception | None) -> None:
        joined = False
        with contextlib.suppress(RuntimeError):
            joined = self._own is not None and self._own.check([JOINS])
        if not joined:
            return
        rank = sys.modules[_C10D].get_rank()
        with contextlib.suppress(RuntimeError):
            self._own.set(knows(rank), "1")
        raise disagreement(self._adapter, {rank: self._reason}) from cause


def knows(rank: int) -> str:
    """The key by which a non-participant tells those who joined that it knows of them."""
    return f"{rank}/knows"


def disagreement(adapter: str, declining: Mapping[int, str]) -> IntegrationError:
    """Return the error for when these ranks, for the given reasons, don't join and others do."""
    reason = next(iter(declining.values()))
    alike = [rank for rank, why in declining.items() if why == reason]
    verb = "has" if len(alike) == 1 else "have"
    return IntegrationError(
        f"{adapter}: {agreement.named(alike)} {verb} {reason}, and other ranks use deepytorch: "
        f"give every rank the same configuration and environment; {OFF_SWITCH}"
    )
