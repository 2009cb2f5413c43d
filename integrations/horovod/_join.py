"""hvd.join: ranks that have run out of batches take part in what the others still do.

NOTE [Journal] Nothing tells a rank that a peer has joined: collectives go straight to
torch.distributed. So every rank keeps a journal of its latest collectives of the global set, a few
words each. A thread, asleep until then, learns from the rendezvous store that some rank joined,
and publishes there what this rank did; from then on each collective is published as it begins. The
rank that joined reads the entries in order, from its own count on, and takes part in each with the
value that changes nothing. The last one to join says at which count it ends: the highest of all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from deepytorch.integrations.common.horovod_common import HorovodInternalError
from deepytorch_core.base import stores

Entry = tuple[Any, ...]
"""The facts that a peer needs to take part in a collective: its name, then plain values."""

_KEPT = 256
_FOREVER = timedelta(days=365)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.01
_END = "end"
_CLOSING_S = 2.0
_openings = itertools.count(1)


@dataclass
class _Round:
    """From one `join` of all ranks to the next."""

    count: int = 0
    publishing: bool = False
    entries: deque[tuple[int, Entry]] = field(default_factory=lambda: deque(maxlen=_KEPT))


class Journal:
    """This rank's latest collectives, and the thread that shows them to ranks that joined."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._rounds: defaultdict[int, _Round] = defaultdict(_Round)
        self._number = 0
        self._replaying = False
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        space = f"deepytorch/horovod/join/{next(_openings)}"
        self._store: Any = cast(Any, PrefixStore(space, c10d._get_default_store()))
        self._thread: threading.Thread | None = None
        if self._size > 1:
            # A connection of its own: a store serves one waiting thread at a time.
            listening = (stores.connection(self._store),)
            self._thread = threading.Thread(target=self._listen, args=listening, daemon=True)
            self._thread.start()

    def write(self, entry: Entry) -> None:
        """Note a collective of the global set that is about to begin."""
        if self._replaying or self._size == 1:
            return
        with self._lock:
            here = self._rounds[self._number]
            number = here.count
            here.count += 1
            here.entries.append((number, entry))
            publishing = here.publishing
        if publishing:
            self._store.set(f"{self._number}/op/{number}", json.dumps(entry))

    def announce(self) -> None:
        """Tell the other ranks that this one is about to `join`."""
        if self._size == 1:
            return
        prefix = f"{self._number}"
        count = self._rounds[self._number].count
        self._store.set(f"{prefix}/count/{self._rank}", str(count))
        for peer in range(self._size):
            self._store.set(f"{prefix}/wake/{peer}", str(count))
        if self._store.add(f"{prefix}/joined", 1) == self._size:
            told = [self._store.get(f"{prefix}/count/{peer}") for peer in range(self._size)]
            counts = [int(value) for value in told]
            # Others may need what it has under way: this round may end before its thread wakes.
            self._publish(self._store, self._number, min(counts))
            last = json.dumps({"last": self._rank})
            self._store.set(f"{prefix}/op/{max(counts)}", last)

    def join(self, take_part: Callable[[Entry], None], check: Callable[[], None]) -> int:
        """Take part in the others' collectives until all have joined; the last one's rank.

        `check` is called again and again, and raises when the others can't come any more.

        Raises HorovodInternalError when the others begin nothing for the time limit, or more than
        can be kept track of.
        """
        if self._size == 1:
            return self._rank
        prefix = f"{self._number}"
        count = self._rounds[self._number].count
        self._replaying = True
        try:
            while not isinstance(entry := self._read(f"{prefix}/op/{count}", check), dict):
                take_part(tuple(entry))
                count += 1
        finally:
            self._replaying = False
        if "error" in entry:
            raise HorovodInternalError(entry["error"])
        with self._lock:
            del self._rounds[self._number]
            self._number += 1
        return int(entry["last"])

    def close(self) -> None:
        """End the threads of all ranks: from now on no `join` can end.

        A thread must not be left waiting when the interpreter ends, nor when the store does. The
        store's server may be in rank 0, which waits a moment for the others.
        """
        if self._thread is None or not (self._thread.is_alive() or self._rank == 0):
            return
        with contextlib.suppress(RuntimeError):  # the store's server may have gone first
            for peer, ahead in itertools.product(range(self._size), range(2)):
                self._store.set(f"{self._number + ahead}/wake/{peer}", _END)
            keys = [f"ended/{peer}" for peer in range(self._size)]
            end = time.monotonic() + _CLOSING_S
            while self._rank == 0 and not self._store.check(keys) and time.monotonic() < end:
                time.sleep(_LONGEST_PAUSE_S)
        self._thread.join(_CLOSING_S)

    def _read(self, key: str, check: Callable[[], None]) -> Any:
        # Asked again and again: a store's wait can't be interrupted.
        end = time.monotonic() + self._timeout_s
        pause = _FIRST_PAUSE_S
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise HorovodInternalError(
                    f"hvd.join on rank {self._rank}: no rank began a collective, and not all "
                    f"joined, within {self._timeout_s:g} s"
                )
            check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return json.loads(self._store.get(key))

    def _listen(self, store: Any) -> None:
        for number in itertools.count():
            key = f"{number}/wake/{self._rank}"
            try:
                store.wait([key], _FOREVER)
                needed = store.get(key).decode()
                if needed == _END:
                    store.set(f"ended/{self._rank}", "")
                    return
                self._publish(store, number, int(needed))
            except RuntimeError:  # the store's server is gone, so is the job
                return

    def _publish(self, store: Any, number: int, needed: int) -> None:
        with self._lock:
            here = self._rounds[number]
            here.publishing = True
            entries = list(here.entries)
        if entries and needed < entries[0][0]:
            error = (
                f"hvd.join: rank {self._rank} is {here.count - needed} collectives ahead of a rank "
                f"that joined, more than the {_KEPT} that are kept: call hvd.synchronize earlier"
            )
            store.set(f"{number}/op/{needed}", json.dumps({"error": error}))
        for count, entry in entries:
            store.set(f"{number}/op/{count}", json.dumps(entry))
