"""Option `debug`: the ranks compare what each is about to start, before anybody starts it.

Native operations on host memory are compared anyhow, in their first signal. What the stock backend
carries out is not: there different sizes or operations hang, or give wrong numbers. Here all ranks
exchange one line through the store before every collective, which costs far more than most
collectives do; it is for finding a fault.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from deepytorch_core.base import agreement, stores
from deepytorch_core.hang import stacks


def comparer(
    store: Any, group: str, rank: int, size: int, *, limit_s: float
) -> Callable[[str], None]:
    """Return what a group's backend calls with a collective's description before it starts it.

    Args:
        store: the group's torch Store.
        rank: this process's rank in the group of `size` ranks.
        limit_s: how long it waits for the other ranks, in seconds.

    The returned function raises torch's DistBackendError, on every rank, when ranks differ or one
    does not come within the group's time limit.
    """
    from torch._C._distributed_c10d import PrefixStore

    # Not the group's own connection: other threads may be waiting over that.
    own_connection = stores.connection(store)
    # A former group of this name may have left keys in the store.
    own = agreement.numbered(own_connection, "deepytorch/compare", rank)
    numbers = itertools.count(1)

    def compare(call: str) -> None:
        number = next(numbers)
        what = f"collective #{number} of group {group} on rank {rank} of {size} (debug=on)"
        _compare(PrefixStore(str(number), own), (rank, size), call, what=what, limit_s=limit_s)
        if number > 1:  # all ranks have come here, so all are through with the last one
            last = PrefixStore(str(number - 1), own)
            common = ["verdict", "verdict/claims"] if rank == 0 else []
            stores.drop(last, [f"value/{rank}", *common])

    return compare


def _compare(store: Any, place: tuple[int, int], call: str, *, what: str, limit_s: float) -> None:
    from torch.distributed import DistBackendError

    rank, size = place
    try:
        texts = agreement.gather(
            store,
            rank=rank,
            size=size,
            value=json.dumps([call, _caller()]),
            here_limit_s=limit_s,
            what=f"{what}, {call},",
        )
    except RuntimeError as error:
        raise DistBackendError(f"{what}, {call}: {error}") from None
    said = [json.loads(text) for text in texts]
    for other in range(1, size):
        if said[other][0] != said[0][0]:
            raise DistBackendError(
                f"ranks entered different operations: {_side(0, said[0])}, "
                f"{_side(other, said[other])}; found before {what} started. Every rank must call "
                "the same collective with the same size and dtype"
            )


def _side(rank: int, said: list[str]) -> str:
    call, caller = said
    return f"rank {rank} {call}" + (f" at {caller}" if caller else "")


def _caller() -> str:
    """The innermost line of the user's own code."""
    frame = sys._getframe(1)
    walker: Any = frame
    while walker is not None:
        if stacks.is_mine(walker.f_code.co_filename):
            return f"{os.path.basename(walker.f_code.co_filename)}:{walker.f_lineno}"
        walker = walker.f_back
    return ""
