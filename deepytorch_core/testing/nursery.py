"""The nursery of workers: a process that has imported torch and forks them in milliseconds.

Tests of failures use up their workers, so the cost of a new one matters: two seconds for
`import torch`, times the ranks. The nursery pays that once. It is single-threaded, holds no process
group and has not loaded the native core. So a fork of it is as good as a new process, but for two
things that are undone. These are the environment variables that tell a rank who it is, and the
address layout. The layout must differ between ranks, lest a pointer put in shared memory work by
accident.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import mmap
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from deepytorch_core.base import config
from deepytorch_core.testing import emulation, worker

READ_LATER = "DEEPYTORCH_"
"""So begin the variables of which nothing takes notice while torch is imported: a worker has those
it is given, and none of its nursery's."""
_MAX_MESSAGE_BYTES = 65536
# By which the address layouts of neighbouring ranks differ.
_SHIFT_BYTES = 1 << 28
# The second binds today's default group to its functions when it is imported: there is none here.
_PRELOAD = ("torch.distributed", "torch.distributed.nn.functional")
# The workers' side of test modules imports these, if the test process has them. Slow ones are only
# for workers like most, whose nursery serves many, and where there is no GPU. Some of them look at
# the GPU when they are imported, and a fork can't use a GPU that has been looked at.
_OFTEN = ("numpy", "pytest", "hypothesis")
_SLOW = (
    "torch.distributed.fsdp",
    "torch._inductor.compile_fx",
    "accelerate",
    "transformers.trainer",
)
_START = (
    "import json, sys; fd, path, preload = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from deepytorch_core.testing import nursery; nursery.serve(fd, preload)"
)


class Nursery:
    """Starts workers that have `env` in addition to this process's environment.

    They have imported the modules `more` too.
    """

    def __init__(self, env: Mapping[str, str], more: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        known = _OFTEN if env or _has_gpu() else (*_OFTEN, *_SLOW)
        preload = [name for name in known if name in sys.modules]
        arguments = json.dumps([theirs.fileno(), sys.path, [*_PRELOAD, *preload, *more]])
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **env}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, arguments],
                env=config.child_environment(**variables),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the test process alone
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def start(
        self,
        place: worker.RankPlace,
        stacks_path: Path,
        *,
        variables: Mapping[str, str],
        namespace: int | None = None,
    ) -> Worker:
        """Fork one worker. RuntimeError when the nursery could not start or died.

        Args:
            place: who it is.
            stacks_path: where it writes its stacks when it crashes.
            variables: its environment variables beyond the nursery's, and all that begin with
                `READ_LATER`.
            namespace: a descriptor of the network namespace it lives in; None is this one.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            request = {
                "rank": place.rank,
                "world_size": place.world_size,
                "store_host": place.store_host,
                "variables": dict(variables),
                "stacks": str(stacks_path),
            }
            descriptors = [theirs.fileno(), *([] if namespace is None else [namespace])]
            pid = self._ask(request, *descriptors)
        return Worker(self, pid, place.rank, Connection(ours.detach()), stacks_path)

    def reap(self, pid: int) -> int:
        """Wait for a worker to end; return its exit code, negative for a signal."""
        return self._ask({"reap": pid})

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _ask(self, request: dict[str, Any], *descriptors: int) -> int:
        with self._lock:
            number = next(self._numbers)
            message = json.dumps({"number": number, **request}).encode()
            try:
                socket.send_fds(self._socket, [message], descriptors)
                while reply := self._socket.recv(_MAX_MESSAGE_BYTES):
                    answered, value = map(int, reply.split())
                    # A test's time limit may have interrupted an earlier asker.
                    if answered == number:
                        return value
            except OSError:
                pass
        raise RuntimeError("the process that starts test workers died; its standard error says why")


def _has_gpu() -> bool:
    import torch  # not at the top: what the documentation names is imported without

    return torch.cuda.is_available()


class Worker:
    """The parent's end of one worker process."""

    def __init__(
        self, nursery: Nursery, pid: int, rank: int, connection: Connection, stacks_path: Path
    ) -> None:
        self.pid = pid
        self.rank = rank
        self.connection = connection
        self._nursery = nursery
        self._stacks_path = stacks_path
        self._pid_descriptor = os.pidfd_open(pid)
        # Ready when there is something to read, or the process ended.
        self.sources: tuple[Connection, int] = (connection, self._pid_descriptor)
        self._exit_code: int | None = None

    def wait(self) -> int:
        """Wait for the process to end; return its exit code, negative for a signal."""
        if self._exit_code is None:
            self._exit_code = self._nursery.reap(self.pid)
        return self._exit_code

    def send_signal(self, number: int) -> None:
        if self._exit_code is None:  # else the pid may be somebody else's
            os.kill(self.pid, number)

    def stacks(self) -> str:
        """Return what the process wrote about its stacks when it crashed or was asked to."""
        if not self._stacks_path.exists():
            return ""
        return self._stacks_path.read_text(errors="replace").strip()

    def kill(self) -> None:
        """Kill the process and everything it started."""
        if self._exit_code is None:
            for kill in (os.killpg, os.kill):
                # Forked, but not yet a group's leader; or reaped for an asker that was interrupted.
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            self.wait()
        self.connection.close()
        os.close(self._pid_descriptor)


def serve(descriptor: int, preload: list[str]) -> None:
    """Import `preload`, then fork workers for the parent at `descriptor` until it goes away."""
    # Cycles of garbage are searched for rarely, also by the workers: that is a sixth of an import.
    gc.set_threshold(50_000, 20, 20)
    for name in preload:
        if name.endswith(".py"):
            runpy.run_path(name)
        else:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 2)
        if not message:
            return
        request = json.loads(message)
        if "reap" in request:
            control.send(f"{request['number']} {_reap(request['reap'])}".encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_worker(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(f"{request['number']} {pid}".encode())


def _reap(pid: int) -> int:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # reaped already: its asker was interrupted and kills it now
        return -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it started, while its id can't be anyone else's
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _become_worker(
    request: dict[str, Any], descriptor: int, namespace: int | None = None
) -> NoReturn:
    try:
        if namespace is not None:
            emulation.enter(namespace)  # first: threads belong to where they are started
            os.close(namespace)
        os.setsid()  # a group of its own, so that what it starts can be killed with it
        rank, world_size = request["rank"], request["world_size"]
        # Too large for the gaps between what is mapped already; never touched.
        _padding = mmap.mmap(
            -1,
            (rank + 1) * _SHIFT_BYTES,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            prot=mmap.PROT_READ,
        )
        inherited = config.child_environment().items()
        os.environ.clear()  # noqa: TID251
        os.environ.update(  # noqa: TID251
            {name: value for name, value in inherited if not name.startswith(READ_LATER)}
        )
        os.environ.update(  # noqa: TID251  what torchrun would set; nothing is read
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR=request["store_host"],
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
            **request["variables"],
        )
        place = worker.RankPlace(rank, world_size, request["store_host"])
        worker.serve(descriptor, place, request["stacks"])
    except worker.UncaughtError:
        raise
    except BaseException:
        traceback.print_exc()
    os._exit(1)
