"""`python -m MODULE`, started in no time: a fork of a process that has imported torch.

Launchers start each rank as a program of its own, and in a test most of what that takes is
importing torch. This stands in for `subprocess.Popen` there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from deepytorch_core.testing import pool
from deepytorch_core.testing.worker import STORE_HOST, RankCall, RankPlace


class ForkedProgram:
    """A running `python -m MODULE ...`, as far as launchers use a `subprocess.Popen`.

    Args:
        command: interpreter, `-m`, the module, and its arguments.
        log: gets what it prints, standard error too.
        env: its whole environment; what torch reads when it is imported is not read again.
        namespace: a descriptor of the network namespace it lives in; None is this one.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        namespace: int | None = None,
    ) -> None:
        _, option, *words = command
        if option != "-m":
            raise ValueError(f"not python -m MODULE: {' '.join(command)}")
        self._folder = tempfile.TemporaryDirectory(prefix="deepytorch-forked-")
        self._worker = pool.nursery().start(
            RankPlace(0, 1, STORE_HOST),
            Path(self._folder.name, "stacks"),
            variables={},
            namespace=namespace,
        )
        self.pid = self._worker.pid
        self.returncode: int | None = None
        call = RankCall(
            store_port=0,
            function=pool.reference(_run),
            payload=pickle.dumps(((words, str(log), dict(env)), {})),
            backend=None,
            group_timeout_s=60,
        )
        self._worker.connection.send_bytes(pickle.dumps(call))

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            _, ended = self._worker.sources
            if not wait([ended], timeout):
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            self.returncode = self._worker.wait()
            self._worker.kill()  # closes what is open
            self._folder.cleanup()
        return self.returncode

    def terminate(self) -> None:
        self._worker.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._worker.send_signal(signal.SIGKILL)


def _run(rank: int, world_size: int, words: list[str], log: str, env: dict[str, str]) -> NoReturn:
    # All of it is the program's own, as if it had been started with it.
    os.environ.clear()  # noqa: TID251
    os.environ.update(env)  # noqa: TID251
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    sys.argv = words
    os._exit(_status(lambda: runpy.run_module(words[0], run_name="__main__", alter_sys=True)))


def _status(program: Callable[[], object]) -> int:
    """The exit status that the interpreter would have after `program`."""
    status = 0
    try:
        program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status
