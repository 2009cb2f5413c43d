"""The parent side of `spawn_ranks`: pools of warm workers, deadlines and reports of failures."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from deepytorch_core.testing.worker import STORE_HOST, Call, FunctionRef, Outcome

# After the first failure the other ranks get this long to fail too; then their stacks are dumped.
_GRACE_S = 2.0
_DUMP_S = 3.0

_START = (
    "import json, sys; fd, rank, size, port, stacks, path = json.loads(sys.argv[1]); "
    "sys.path[:] = path; from deepytorch_core.testing import worker; "
    "worker.serve(fd, worker.Place(rank, size, port), stacks)"
)


class RankError(RuntimeError):
    """Some ranks of a `spawn_ranks` call failed.

    Attributes:
        rank: the rank that failed first.
        traceback: that rank's traceback, or its stacks when it was stuck or died.
        exceptions: rank -> its exception, for every rank that failed. Where an exception could
            not be pickled, or the process died, a RuntimeError with its text.
        stacks: rank -> the Python stacks of a rank that was stuck, or crashed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        traceback: str = "",
        exceptions: Mapping[int, BaseException] | None = None,
        stacks: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.exceptions = dict(exceptions or {})
        self.stacks = dict(stacks or {})


class RankTimeoutError(RankError):
    """Some ranks did not finish within `timeout_s`."""


class _Worker:
    def __init__(self, pool: Pool, rank: int) -> None:
        self.rank = rank
        self.stacks_path = pool.folder / f"stacks-{rank}"
        ours, theirs = socket.socketpair()
        arguments = [
            theirs.fileno(),
            rank,
            pool.world_size,
            pool.store_port,
            str(self.stacks_path),
            sys.path,
        ]
        # What torchrun would set. Through `env`, so that nothing here touches this process's own.
        environment = {
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(pool.world_size),
            "LOCAL_WORLD_SIZE": str(pool.world_size),
            "MASTER_ADDR": STORE_HOST,
            "MASTER_PORT": str(pool.store_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **pool.env,
        }
        with theirs:
            self.process = subprocess.Popen(
                ["env", *(f"{name}={value}" for name, value in environment.items())]
                + [sys.executable, "-c", _START, json.dumps(arguments)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # its own group: Ctrl-C is ours, and children die with it
            )
        self.connection = Connection(ours.detach())

    def death(self) -> str:
        """How the process ended, in words."""
        code = self.process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code} in the middle of the call"

    def stacks(self) -> str:
        with contextlib.suppress(OSError):
            return self.stacks_path.read_text(errors="replace").strip()
        return ""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class Pool:
    """`world_size` warm workers and the store they meet at."""

    def __init__(self, world_size: int, env: Mapping[str, str]) -> None:
        from torch._C._distributed_c10d import TCPStore

        self.world_size = world_size
        self.env = dict(env)
        self.folder = Path(tempfile.mkdtemp(prefix="deepytorch-ranks-"))
        self._store = TCPStore(STORE_HOST, 0, is_master=True, wait_for_workers=False)
        self.store_port = self._store.port
        self._num_calls = 0
        self._workers = [_Worker(self, rank) for rank in range(world_size)]

    def close(self) -> None:
        """Kill the workers, and whatever they started, and remove every trace."""
        for worker in self._workers:
            worker.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def is_alive(self) -> bool:
        return all(worker.process.poll() is None for worker in self._workers)

    def call(
        self,
        function: FunctionRef,
        payload: bytes,
        *,
        backend: str | None,
        timeout_s: float,
        expect_dead: frozenset[int],
    ) -> tuple[list[Any], bool]:
        """Run one call; return each rank's result and whether the workers can serve another."""
        self._num_calls += 1
        call = Call(
            number=self._num_calls,
            function=function,
            payload=payload,
            backend=backend,
            # Shorter than the hard limit: the backend's own report of a hang says more.
            group_timeout_s=max(1.0, 0.75 * timeout_s),
        )
        message = pickle.dumps(call)
        failures = _Failures(function, self.world_size, timeout_s)
        for worker in self._workers:
            with contextlib.suppress(OSError):  # a dead one shows below, as end of file
                worker.connection.send_bytes(message)
        results: dict[int, Any] = {}
        pending = {worker.connection: worker for worker in self._workers}
        deadline = time.monotonic() + timeout_s
        healthy = True
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.add_stuck(list(pending.values()))
                break
            for worker in [pending[connection] for connection in pending if connection in ready]:
                del pending[worker.connection]
                outcome = _receive(worker)
                if outcome is None and worker.rank in expect_dead and worker.process.wait() < 0:
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


def _receive(worker: _Worker) -> Outcome | None:
    try:
        outcome: Outcome = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return outcome


class _Failures:
    """Collects what went wrong on which rank, and words it."""

    def __init__(self, function: FunctionRef, world_size: int, timeout_s: float) -> None:
        self._function = function
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._exceptions: dict[int, BaseException] = {}  # in order of arrival
        self._tracebacks: dict[int, str] = {}
        self._stacks: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._exceptions)

    def add_exception(self, rank: int, outcome: Outcome) -> None:
        error: BaseException = RuntimeError(outcome.summary)
        if outcome.payload is not None:
            # An exception class of a module that only the worker imported: its text must do.
            with contextlib.suppress(Exception):
                error = pickle.loads(outcome.payload)
        self._exceptions[rank] = error
        self._tracebacks[rank] = outcome.traceback

    def add_death(self, worker: _Worker) -> None:
        how = worker.death()
        self._exceptions[worker.rank] = RuntimeError(f"rank {worker.rank} {how}")
        self._stacks[worker.rank] = worker.stacks()

    def add_stuck(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        for worker in workers:
            # One that is still starting up has no handler yet, and dies of the signal.
            while (
                not worker.stacks()
                and worker.process.poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.02)
            self._stacks[worker.rank] = worker.stacks() or "(no stacks: it was still starting)"

    def raise_if_any(self) -> None:
        if not self._exceptions and not self._stacks:
            return
        timed_out = not self._exceptions
        rank = next(iter(self._exceptions), next(iter(self._stacks), -1))
        text = self._tracebacks.get(rank) or self._stacks.get(rank, "")
        error = (RankTimeoutError if timed_out else RankError)(
            "\n".join(self._lines(timed_out)),
            rank=rank,
            traceback=text,
            exceptions=self._exceptions,
            stacks=self._stacks,
        )
        raise error from self._exceptions.get(rank)

    def _lines(self, timed_out: bool) -> list[str]:
        name = f"{self._function.qualname} ({self._function.path})"
        if timed_out:
            stuck = sorted(self._stacks)
            lines = [f"{name}: ranks {stuck} did not finish within {self._timeout_s:g} s"]
        else:
            failed = list(self._exceptions)
            lines = [f"{name}: {len(failed)} of {self._world_size} ranks failed: {failed}"]
        for rank, error in self._exceptions.items():
            lines.append(f"\n--- rank {rank}: {type(error).__name__}: {error}")
            lines.append(self._tracebacks.get(rank, "").rstrip())
        for rank, stacks in self._stacks.items():
            state = "when it died" if rank in self._exceptions else "where it was stuck"
            lines.append(f"\n--- rank {rank}: stacks {state}\n{stacks}")
        return lines


_idle: dict[tuple[int, tuple[tuple[str, str], ...]], Pool] = {}
_lock = threading.Lock()


def spawn_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    backend: str | None = None,
    expect_dead: set[int] | frozenset[int] = frozenset(),
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, world_size, *args, **kwargs)` in `world_size` processes.

    Workers stay warm between calls: the second call of a size costs milliseconds. They have one
    compute thread each and torchrun's environment variables, seeds are 0 at the start of a call,
    and process groups left open are destroyed after it.

    Args:
        fn: a module-level function; its file needs no importable name (test modules have none).
        world_size: number of ranks, each in its own process.
        *args: passed on to `fn`; must pickle, as must what `fn` returns.
        timeout_s: hard limit in seconds; what has not finished then is killed.
        backend: when given, torch.distributed is initialised with it before `fn` runs, with a
            group timeout of 0.75 * `timeout_s`.
        expect_dead: ranks that may die by a signal; such a rank's result is None.
        env: additional environment variables of the workers (a pool of its own per setting).
        fresh: use new workers and end them afterwards, for calls that change the process.
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
    function = _reference(fn)
    payload = pickle.dumps((args, kwargs))
    key = (world_size, tuple(sorted((env or {}).items())))
    with _lock:
        pool = None if fresh else _idle.pop(key, None)
    if pool is not None and not pool.is_alive():
        pool.close()
        pool = None
    if pool is None:
        pool = Pool(world_size, env or {})
    reusable = False
    try:
        results, reusable = pool.call(
            function,
            payload,
            backend=backend,
            timeout_s=timeout_s,
            expect_dead=frozenset(expect_dead),
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


def _reference(fn: Callable[..., Any]) -> FunctionRef:
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
        pools = list(_idle.values())
        _idle.clear()
    for pool in pools:
        pool.close()


atexit.register(close_idle_workers)
