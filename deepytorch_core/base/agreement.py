"""All ranks decide together, over the rendezvous store: before any of them changes a backend, say.

If one rank used deepytorch and another the stock backend, both would wait for each other in their
first collective. That happens when only some ranks import deepytorch, or when the adapter can't be
compiled on one node. So each rank says what it could do, and one verdict is written, once, by
whichever rank comes to an end first; a rank that comes later reads that verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from deepytorch_core.base import stores
from deepytorch_core.base.console import say

# Ranks come here from the same line of the same script; the rendezvous has just brought them
# together.
HERE_LIMIT_S = 60.0
# After so long it is said whom they wait for.
PATIENCE_S = 5.0
# The same where ranks may well come late: well before a minute is over.
TELL_S = 45.0
# As long as another rank may compile.
_READY_LIMIT_S = 960.0

_YES = "yes"


def numbered(store: Any, name: str, rank: int) -> Any:
    """A key space of its own for the next exchange called `name`.

    Counted in the store: processes that share it may have had others before, each its own. Raises
    RuntimeError where the store has not got what is needed to agree.
    """
    from torch._C._distributed_c10d import PrefixStore

    if missing := stores.lacks(store):
        raise RuntimeError(missing)
    number = PrefixStore(name, store).add(f"calls/{rank}", 1)
    return PrefixStore(f"{name}/{number}", store)


def agree(
    store: Any,
    *,
    rank: int,
    size: int,
    prepare: Callable[[], str | None],
    here_limit_s: float,
) -> str | None:
    """Run `prepare` on every rank; return None if all succeeded, else why not, the same everywhere.

    Args:
        store: a torch Store with a key space of its own for this decision.
        prepare: returns None, or the reason why this rank can't.
        here_limit_s: seconds to wait for every rank to come here at all.
    """
    if size == 1:
        return prepare()
    store.set(f"here/{rank}", "1")
    reason = prepare()
    store.set(f"ready/{rank}", reason or _YES)
    if rank == 0:
        verdict = _judge(store, size, here_limit_s)
    else:
        verdict = _await(store, here_limit_s, tells=rank == 1)
    # The first verdict stands: a rank that had given up must not be left behind by one that hadn't.
    final = stores.first(store, "verdict", verdict)
    return None if final == _YES else final


def gather(
    store: Any, *, rank: int, size: int, value: str, here_limit_s: float, what: str = ""
) -> list[str]:
    """Every rank's `value`, by rank; the same list, or the same error, on every rank.

    Args:
        store: a torch Store with a key space of its own for this exchange.
        here_limit_s: seconds to wait for every rank to come here.
        what: the ranks do here, for the line that tells of a long wait; empty: none does.

    Raises RuntimeError naming the ranks that did not come.
    """
    keys = [f"value/{other}" for other in range(size)]
    store.set(keys[rank], value)
    if rank == 0:
        absent = _absent(store, keys, min(TELL_S, here_limit_s))
        if absent and here_limit_s > TELL_S:
            if what:
                say(
                    f"{what} waits for {named(absent)}, {TELL_S:g} s by now, up to "
                    f"{here_limit_s:g} s",
                    level="warning",
                )
            absent = _absent(store, keys, here_limit_s - TELL_S)
        verdict = f"{named(absent)} did not come within {here_limit_s:g} s" if absent else _YES
    elif stores.wait(store, ["verdict"], 2 * here_limit_s):
        verdict = stores.text(store, "verdict")
    else:
        verdict = "rank 0 came to no decision"
    final = stores.first(store, "verdict", verdict)
    if final != _YES:
        raise RuntimeError(final)
    return stores.texts(store, keys)


class StoreQuestion:
    """A question to every rank that nobody waits for: `answers` looks whether all have answered.

    It looks for the first time in the step after the one that asks. So where ranks end a step
    together, all see the answers in the same one. That some go on without a rank that others have
    heard is possible: it has to be each one's own affair.

    Args:
        store: a torch Store with a key space of its own for this exchange.
        value: this rank's answer.
        here_limit_s: seconds until a rank that has not answered is missing.
    """

    def __init__(
        self, store: Any, *, rank: int, size: int, value: str, here_limit_s: float
    ) -> None:
        self._store = store
        self._keys = [f"value/{other}" for other in range(size)]
        self._limit_s = here_limit_s
        self._asked = time.monotonic()
        self._is_new = True
        store.set(self._keys[rank], value)

    def answers(self) -> list[str] | None:
        """Every rank's value, by rank; None where they are not all there yet, and at first.

        Raises RuntimeError naming the ranks that did not come in time.
        """
        is_new, self._is_new = self._is_new, False
        if is_new:
            return None
        if self._store.check(self._keys):
            return stores.texts(self._store, self._keys)
        if time.monotonic() - self._asked <= self._limit_s:
            return None
        absent = [index for index, key in enumerate(self._keys) if not self._store.check([key])]
        raise RuntimeError(f"{named(absent)} did not come within {self._limit_s:g} s")


def _judge(store: Any, size: int, here_limit_s: float) -> str:
    absent = _not_here(store, list(range(size)), here_limit_s, tells=True)
    if absent:
        return f"{named(absent)} did not activate it within {here_limit_s:g} s"
    absent = _absent(store, [f"ready/{rank}" for rank in range(size)], _READY_LIMIT_S)
    if absent:
        return f"{named(absent)} did not have it ready within {_READY_LIMIT_S:g} s"
    answers = stores.texts(store, [f"ready/{rank}" for rank in range(size)])
    for rank, answer in enumerate(answers):
        if answer != _YES:
            return f"rank {rank}: {answer}"
    return _YES


def _await(store: Any, here_limit_s: float, *, tells: bool) -> str:
    if _not_here(store, [0], here_limit_s, tells=tells):
        return f"rank 0 did not activate it within {here_limit_s:g} s"
    if not stores.wait(store, ["verdict"], here_limit_s + _READY_LIMIT_S):
        return "rank 0 came to no decision"
    return stores.text(store, "verdict")


def _not_here(store: Any, ranks: list[int], limit_s: float, *, tells: bool) -> list[int]:
    keys = [f"here/{rank}" for rank in ranks]
    patience_s = min(PATIENCE_S, limit_s / 2)
    absent = _absent(store, keys, patience_s)
    if absent and tells:
        late = named([ranks[index] for index in absent])
        say(f"waiting for {late} to activate deepytorch; torch's own collectives are kept if not")
    return [ranks[index] for index in _absent(store, keys, limit_s - patience_s)] if absent else []


def _absent(store: Any, keys: list[str], limit_s: float) -> list[int]:
    """Wait for all `keys`; return the indices of those that did not come in time."""
    if stores.wait(store, keys, limit_s):
        return []
    return [index for index, key in enumerate(keys) if not store.check([key])]


def named(numbers: Sequence[int]) -> str:
    """ "rank 5", "ranks 5, 7": the first eight of them."""
    names = ", ".join(str(rank) for rank in numbers[:8]) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {names}"
