"""The parent side of `spawn_ranks`: pools of warm workers, deadlines and reports of failures."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch_core.base import config, stores
from deepytorch_core.testing.emulation import Placement
from deepytorch_core.testing.failures import Failures
from deepytorch_core.testing.nursery import READ_LATER, Nursery, Worker
from deepytorch_core.testing.worker import STORE_HOST, CallOutcome, FunctionRef, RankCall, RankPlace

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# After the first failure the other ranks get this long to fail too; then their stacks are dumped.
_GRACE_S = 2.0


class Pool:
    """`world_size` warm workers and the store they meet at.

    `placement` is where they live on emulated nodes; None is this machine as it is. They have
    `variables` besides their nursery's.
    """

    def __init__(
        self,
        world_size: int,
        nursery: Nursery,
        placement: Placement | None = None,
        *,
        variables: Mapping[str, str],
    ) -> None:
        self.world_size = world_size
        self._folder = Path(tempfile.mkdtemp(prefix="deepytorch-ranks-"))

        self._placement = placement
        self._store: TCPStore | None = None
        self._store_host = STORE_HOST if placement is None else placement.network.switch_address
        self._workers: list[Worker] = []
        for rank in range(world_size):
            self._workers.append(
                nursery.start(
                    RankPlace(rank, world_size, self._store_host),
                    self._folder / f"stacks-{rank}",
                    variables={**variables, **_local_variables(rank, world_size, placement)},
                    namespace=None if placement is None else placement.namespace(rank),
                )
            )

    def close(self) -> None:
        """Kill the workers, and whatever they started, and remove every trace."""
        for worker in self._workers:
            worker.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def is_alive(self) -> bool:
        return not wait([source for worker in self._workers for source in worker.sources], 0)

    def call(
        self,
        function: FunctionRef,
        payload: bytes,
        *,
        backend: str | None,
        timeout_s: float,
        expect_dead: frozenset[int],
        expect_exit: frozenset[int] = frozenset(),
    ) -> tuple[list[Any], bool]:
        """Run one call; return each rank's result and whether the workers can serve another."""
        # Each call has a store of its own, as env:// has no prefix. In the same store a second
        # group would find the keys of the first, such as addresses at which nobody listens any
        # more.
        self._store = self._serve_store()
        call = RankCall(
            store_port=self._store.port,
            function=function,
            payload=payload,
            backend=backend,
            # Shorter than the hard limit: the backend's own report of a hang says more.
            group_timeout_s=max(1.0, 0.75 * timeout_s),
        )
        message = pickle.dumps(call)
        failures = Failures(function, self.world_size, timeout_s)
        for worker in self._workers:
            with contextlib.suppress(OSError):  # a dead one shows below, as end of file
                worker.connection.send_bytes(message)
        results: dict[int, Any] = {}
        pending = list(self._workers)
        deadline = time.monotonic() + timeout_s
        healthy = True
        while pending:
            # The process too: what a dead rank has forked keeps its end of the socket open.
            sources = [source for worker in pending for source in worker.sources]
            ready = wait(sources, max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.add_stuck(pending)
                break
            for worker in [worker for worker in pending if set(worker.sources) & set(ready)]:
                pending.remove(worker)
                outcome = _receive(worker)
                killed = worker.rank in expect_dead and outcome is None and worker.wait() < 0
                if killed or (worker.rank in expect_exit and outcome is None):
                    results[worker.rank] = None
                    healthy = False
                elif outcome is None:
                    failures.add_death(worker)
                elif outcome.ok:
                    results[worker.rank] = pickle.loads(outcome.payload or b"")
                else:
                    failures.add_exception(worker.rank, outcome)
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        failures.raise_if_any()
        return [results[rank] for rank in range(self.world_size)], healthy

    def _serve_store(self) -> TCPStore:
        # Here and not in a rank, so that the death of a rank doesn't take it away.
        def serve() -> TCPStore:
            return stores.serve(self._store_host)

        return serve() if self._placement is None else self._placement.network.on_switch(serve)


def _local_variables(rank: int, world_size: int, placement: Placement | None) -> dict[str, str]:
    """Return what torchrun would say of the rank's node, and what the node's network needs."""
    if placement is None:
        return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    seat = placement.seats[rank]
    return {
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(sum(other.node == seat.node for other in placement.seats)),
        "GROUP_RANK": str(seat.node),
        **placement.network.environment(seat.node),
    }


def _receive(worker: Worker) -> CallOutcome | None:
    try:
        if not worker.connection.poll():
            return None
        outcome: CallOutcome = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return outcome


# Environment variables and modules.
_Kind = tuple[tuple[tuple[str, str], ...], tuple[str, ...]]

# The number of ranks, and what each is given besides.
_Key = tuple[int, _Kind, tuple[tuple[str, str], ...]]

_nurseries: dict[_Kind, Nursery] = {}
_idle: dict[_Key, Pool] = {}
_lock = threading.Lock()


def spawn_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    backend: str | None = None,
    expect_dead: set[int] | frozenset[int] = frozenset(),
    expect_exit: set[int] | frozenset[int] = frozenset(),
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    preload: Sequence[str] = (),
    placement: Placement | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, world_size, *args, **kwargs)` in `world_size` processes.

    Workers stay warm between calls: the second call of a size costs milliseconds. They have one
    compute thread each and torchrun's environment variables. Seeds are 0 at the start of a call,
    and process groups left open are destroyed after it.

    Args:
        fn: a module-level function; its file needs no importable name (test modules have none).
        world_size: number of ranks, each in its own process.
        *args: passed on to `fn`; must pickle, as must what `fn` returns.
        timeout_s: hard limit in seconds; what has not finished then is killed.
        backend: when given, torch.distributed is initialised with it before `fn` runs, with a
            group timeout of 0.75 * `timeout_s`.
        expect_dead: ranks that may die by a signal; such a rank's result is None.
        expect_exit: ranks that may end their process in any way, `os._exit` too; result None.
        env: additional environment variables of the workers (a pool of its own per setting; those
            that don't begin with DEEPYTORCH_ are there already when torch is imported).
        fresh: use new workers and end them afterwards, for calls that change the process.
        preload: modules that workers have imported, and files that they have run, when they start:
            that costs once what `fresh` ones would each pay (a pool of its own per list).
        placement: where the ranks live on emulated nodes; their workers are fresh ones.
        **kwargs: passed on to `fn`.

    Returns:
        What `fn` returned, by rank.

    Raises:
        ValueError: `fn` is not a module-level function of a source file, or a bad `world_size`.
        RankError: a rank raised or died; has every failed rank's exception and traceback.
        RankTimeoutError: ranks were still running after `timeout_s`; has their stacks.
    """
    if world_size < 1:
        raise ValueError(f"spawn_ranks: world_size must be at least 1, got {world_size}")
    function = reference(fn)
    payload = pickle.dumps((args, kwargs))
    own, later = _divided(env or {})
    later = {**_divided(config.child_environment())[1], **later}
    kind = (tuple(sorted(own.items())), tuple(preload))
    key = (world_size, kind, tuple(sorted(later.items())))
    if placement is not None and len(placement.seats) != world_size:
        raise ValueError(
            f"spawn_ranks: {world_size} ranks, but {len(placement.seats)} seats for them"
        )
    fresh = fresh or placement is not None
    pool = None if fresh else _take_idle(key)
    if pool is None:
        pool = Pool(world_size, nursery(kind), placement, variables=later)
    reusable = False
    try:
        results, reusable = pool.call(
            function,
            payload,
            backend=backend,
            timeout_s=timeout_s,
            expect_dead=frozenset(expect_dead),
            expect_exit=frozenset(expect_exit),
        )
    finally:
        reusable = reusable and not fresh
        if reusable:
            with _lock:
                previous, _idle[key] = _idle.get(key), pool
            pool = previous  # two threads at once made two; one stays warm
        if pool is not None:
            pool.close()
    return results


def _divided(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split what needs a nursery of its own from what any worker is given when it is forked."""
    later = {name: value for name, value in env.items() if name.startswith(READ_LATER)}
    return {name: value for name, value in env.items() if name not in later}, later


def _take_idle(key: _Key) -> Pool | None:
    with _lock:
        pool = _idle.pop(key, None)
    if pool is not None and not pool.is_alive():
        pool.close()
        return None
    return pool


def nursery(kind: _Kind = ((), ())) -> Nursery:
    """The process that forks workers with these variables and modules."""
    env, preload = kind
    with _lock:
        found = _nurseries.get(kind)
        if found is None or not found.is_alive():
            found = _nurseries[kind] = Nursery(dict(env), preload)
    return found


def reference(fn: Callable[..., Any]) -> FunctionRef:
    """How a worker finds `fn`. Raises ValueError where it could not."""
    qualname = getattr(fn, "__qualname__", "")
    module = getattr(fn, "__module__", "")
    path = getattr(sys.modules.get(module), "__file__", None)
    if not qualname or "<" in qualname or path is None:
        raise ValueError(
            f"spawn_ranks: {fn!r} is not a module-level function of a source file, so another "
            "process cannot import it; move it to the top of its module"
        )
    return FunctionRef(os.path.abspath(path), module, qualname)


def close_idle_workers() -> None:
    """End all warm workers; the next `spawn_ranks` starts new ones."""
    with _lock:
        pools, nurseries = list(_idle.values()), list(_nurseries.values())
        _idle.clear()
        _nurseries.clear()
    for pool in pools:
        pool.close()
    for nursery in nurseries:
        nursery.close()


atexit.register(close_idle_workers)
