"""A process that finds out on a twin whether a model packs, while the training goes on.

The twin's description goes in on stdin, pickled. The answer comes out on stdout in JSON: the
conventions by which to pack, or why not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import select
import subprocess
import sys
import threading
from typing import Any

from deepytorch_core.base import unlisted

# Modules are found where this process finds them, and not in the current folder before all others.
# Ctrl-C is for the training, which may go on.
_PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[2:]; "
    "from deepytorch.integrations.padding_free import packing_helper; "
    "packing_helper.main(int(sys.argv[1]))"
)
_LIMIT_S = 120.0
_NICE = 10


class Helper:
    """One process, which begins with what takes it seconds, and is then asked one thing.

    Args:
        environment: variables of the process.
        is_awaited: whether the training waits for it; else the training goes first.
    """

    def __init__(self, environment: dict[str, str], *, is_awaited: bool) -> None:
        self.answer: dict[str, Any] | None = None
        """{"conventions": {...}} or {"reason": why not}; None while it is at work."""
        self._environment = environment
        self._nice = "0" if is_awaited else str(_NICE)
        self._process = self._started()
        self._thread: unlisted.Thread | None = None

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, self._nice, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,  # not in the terminal's group: Ctrl-C is not for it
        )

    def ask(self, twin: bytes) -> None:
        """Have it examine a pickled `packing_twin.Twin`."""
        if self._process.poll() is not None:
            self._process = self._started()  # nobody has asked the first one for too long
        self._thread = unlisted.Thread(self._listen, (twin,), name="deepytorch-packing")
        self._thread.start()

    def wait(self) -> None:
        """Until there is an answer, or it has ended that was never asked."""
        if self._thread is None:
            self._process.wait()
        else:
            self._thread.join()

    def close(self) -> None:
        """End it, whether it is done or not."""
        with contextlib.suppress(OSError):
            self._process.kill()
            if self._thread is None:
                self._process.communicate()  # else who listens does that

    def _listen(self, twin: bytes) -> None:
        try:
            told, _ = self._process.communicate(twin, timeout=_LIMIT_S)
            self.answer = json.loads(told)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self.close()
            self.answer = {"reason": f"it could not be tried out: {type(error).__name__}"}


def main(nice: int) -> None:
    """Examine the twin that stdin describes, `nice` to others, and print what is found.

    Ends without a word if nobody describes one for long.
    """
    os.nice(nice)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    from . import packing_twin
    from .packing_probe import Unsupported

    if not _is_asked():
        return
    answer: dict[str, Any]
    try:
        twin = pickle.loads(sys.stdin.buffer.read())
        answer = {"conventions": dataclasses.asdict(packing_twin.examine(twin))}
    except Unsupported as reason:
        answer = {"reason": str(reason)}
    except Exception as error:  # whatever a model's code may raise
        answer = {"reason": f"its twin fails: {type(error).__name__}: {error}".partition("\n")[0]}
    answers.write(json.dumps(answer))
    answers.close()


def _is_asked() -> bool:
    """Wait for something on stdin; False if nothing comes for long."""
    return bool(select.select([sys.stdin], [], [], _LIMIT_S)[0])


def _end_with(parent: int) -> None:
    import time

    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
