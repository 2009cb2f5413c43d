"""Keeps the job's store on the rank that serves it while others may need it, for a while.

Groups meet at their first use, over the store. torch's own rendezvous has rank 0 serve that. If
it ended early the others could not use a group for the first time any more. So its process stays
until they have closed their connections to the store, `LIMIT_S` at most. A job without groups
besides the default one needs no store by then, and nobody waits in it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import util
from types import ModuleType
from typing import Any

from deepytorch_core.base import unlisted
from deepytorch_core.base.console import say
from deepytorch_core.base.patching import Patches
from deepytorch_core.hang import store_limit

LIMIT_S = 30.0
"""So long the store outlives the default group of the rank that serves it, at most."""
_POLL_S = 0.05
_TOLD_AFTER_S = 2.0
_AWAITED_S = 0.5  # other ranks wait for this one already: better that they hear of its end


class _Keeper:
    """Knows the store of this process's default group."""

    def __init__(self, store: Any) -> None:
        self.store: Any = store
        self.pid = os.getpid()
        self.over = threading.Event()
        self.thread: unlisted.Thread | None = None

    def is_needed(self) -> bool:
        """Whether this process serves the store, others are there, and groups besides the first."""
        from torch.distributed import distributed_c10d as c10d

        server = store_limit.server_below(self.store)
        return server is not None and c10d._world.group_count > 1 and _others(server.port) > 0

    def keep(self) -> None:
        """Hold the store until the others have left, in a thread of its own."""
        port = store_limit.server_below(self.store).port
        self.thread = unlisted.Thread(self._hold, (port,), name="deepytorch-store")
        self.thread.start()

    def _hold(self, port: int) -> None:
        until = time.monotonic() + LIMIT_S
        while _others(port) and time.monotonic() < until and not self.over.wait(_POLL_S):
            pass
        self.store = None

    def release(self) -> None:
        """Let go of the store, now."""
        self.over.set()
        if self.thread is not None:
            self.thread.join(LIMIT_S)
        self.store = None


_keeper: _Keeper | None = None
_waits_in: int | None = None
"""The process that is to wait at its end, by its id: children that are forked forget it."""
_patches: Patches | None = None


def install(c10d: ModuleType, patches: Patches) -> None:
    """Have a store that is kept let go of before this process makes the next.

    Args:
        c10d: the module torch.distributed.distributed_c10d.
        patches: receives what was replaced.
    """
    global _patches

    def releasing(original: Callable[..., Any]) -> Callable[..., Any]:
        def rendezvous(*args: Any, **kwargs: Any) -> Any:
            if _keeper is not None and _keeper.thread is not None:
                _keeper.release()
            return original(*args, **kwargs)

        return rendezvous

    patches.replace(
        c10d,
        "rendezvous",
        releasing,
        why="a store that is kept for other ranks makes room for the next one",
    )
    _patches = patches


def join(store: Any) -> Callable[[], None]:
    """Call it where the default group is made; returns what to call when it has ended.

    Args:
        store: the default group's torch Store.
    """
    global _keeper, _waits_in
    mine = _keeper = _Keeper(store)
    if _waits_in != os.getpid():  # once, or a thousand groups would leave as many behind
        _waits_in = os.getpid()
        util.Finalize(None, _wait_at_end, exitpriority=0)

    def closed() -> None:
        # Two stores in one process at one port would be one, with the old one's content.
        makes_room = _patches is not None and _patches.active
        if makes_room and mine.pid == os.getpid() and mine.is_needed():
            mine.keep()
        else:
            mine.store = None

    return closed


def _wait_at_end() -> None:
    """Before this process ends: the store goes with it. One that has failed waits for nobody."""
    from deepytorch_core.hang import live  # not above: `import deepytorch` would take twice as long

    mine = _keeper
    if mine is None or mine.pid != os.getpid() or mine.store is None or _has_failed():
        return
    with contextlib.suppress(Exception):  # the program is over, whatever this comes to
        if mine.thread is None:
            if not mine.is_needed():
                return
            mine.keep()
        began, is_told = time.monotonic(), False
        while mine.thread is not None and mine.thread.is_alive():
            mine.thread.join(_POLL_S)
            waited_s = time.monotonic() - began
            if waited_s > _AWAITED_S and live.awaited(_AWAITED_S):
                break
            if waited_s > _TOLD_AFTER_S and not is_told:
                is_told = True
                say(
                    "this process serves the job's store, which other ranks may still need, and "
                    f"ends when they have left or after {LIMIT_S:g} s"
                )


def _has_failed() -> bool:
    """Whether an exception ends this process."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def _others(port: int) -> int:
    """How many connections other processes have to the store's server at `port` in this one.

    0 where that is not served here.
    """
    is_served = False
    local, served = set(), set()
    for number, _ in store_limit.sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as own:
            if own.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            mine = _address(own.getsockname())
            local.add(mine)
            if mine[1] == port:
                if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    is_served = True
                else:
                    served.add(_address(own.getpeername()))
    return len(served - local) if is_served else 0


def _address(name: tuple[Any, ...]) -> tuple[str, int]:
    """Host and port, the same whether a socket of IPv6 or one of IPv4 tells of it."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
