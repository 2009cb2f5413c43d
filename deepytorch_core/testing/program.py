"""Programs that tests run as a user would."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ABORTED = "terminate called without an active exception"
_OURS = "through deepytorch"
_MOST_RUNS = 4


def run_program(
    command: Sequence[str | Path], *, timeout: float = 110, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, once more where torch itself took the program down.

    A process with a gloo group of torch's own now and then aborts when the group or the interpreter
    ends (about 1 of 80), or never gets past that. Only programs that deepytorch had no part in are
    run again for it.

    Args:
        command: the program and its arguments.
        timeout: seconds for one run; then it is killed, with every process that it started.
        **settings: as for `subprocess.Popen`; the output is text and captured.

    Returns what became of the last run; its status is not checked.

    Raises:
        subprocess.TimeoutExpired: with what the program had printed.
    """
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    for attempt in range(1, _MOST_RUNS + 1):
        process = subprocess.Popen(command, text=True, start_new_session=True, **settings)
        timed_out = False
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if timed_out:
            out, err = process.communicate()
        said = (out or "") + (err or "")
        torch_alone = _OURS not in said and (timed_out or _ABORTED in said)
        if torch_alone and process.returncode != 0 and attempt < _MOST_RUNS:
            continue
        if timed_out:
            raise subprocess.TimeoutExpired(command, timeout, out, err)
        break
    return subprocess.CompletedProcess(command, process.returncode, out, err)
