"""All planting of hangs needs a job to plant in, and the command that is asked about it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SETTLE_S = 2.5
_START_LIMIT_S = 90.0


class NotReadyError(RuntimeError):
    """The job did not start, so nothing was planted: its port was taken meanwhile, say."""


def launch(
    script: Path, folder: Path, ranks: int, environment: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    """Starts the ranks of a job, each with `folder` as its argument and in a session of its own.

    What a rank says is in `folder`, its input is a pipe into which nobody writes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        own = dict(
            os.environ,  # noqa: TID251
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
            DEEPYTORCH_TUNE="off",
            DEEPYTORCH_LOG="error",
            **environment,
        )
        with open(folder / f"log{rank}", "wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(script), str(folder)],
                    env=own,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    return processes


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kills the ranks and what they have started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def await_files(files: list[Path], folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Returns when all `files` are written; raises NotReadyError if that takes too long."""
    deadline = time.monotonic() + _START_LIMIT_S
    while not all(file.exists() and file.read_text() for file in files):
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            missing = [file.name for file in files if not file.exists()]
            raise NotReadyError(
                f"the script did not come to where it makes {missing}:\n{logs(folder)}"
            )
        time.sleep(0.05)


def logs(folder: Path) -> str:
    """Return what the ranks said."""
    return "\n".join(log.read_text() for log in sorted(folder.glob("log*")))


def ask(pid: int) -> dict[str, Any]:
    """Return what the command says about the job of a process."""
    command = [sys.executable, "-m", "deepytorch.cli", "report", "--hang", "--json"]
    done = subprocess.run(
        [*command, "--pid", str(pid)], capture_output=True, text=True, timeout=120, check=True
    )
    (case,) = json.loads(done.stdout)
    found: dict[str, Any] = case
    return found
