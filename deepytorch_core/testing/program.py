"""Programs that tests run as a user would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

_ABORTED = "terminate called without an active exception"
_OURS = "through deepytorch"
_MOST_RUNS = 4
# A stock program whose processes use less than this share of a core for so long will never end.
_IDLE_SHARE = 0.05
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def run_program(
    command: Sequence[str | Path], *, timeout: float = 110, idle: float = 15, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, once more where torch itself took the program down.

    A process with a gloo group of torch's own now and then aborts when the group or the interpreter
    ends (about 1 of 80). It may also never get past that. Only programs that deepytorch had no part
    in are run again for it.

    Args:
        command: the program and its arguments.
        timeout: seconds for one run; then it is killed, with every process that it started.
        idle: seconds after which a stock program whose processes do nothing is killed too.
        **settings: as for `subprocess.Popen`; the output is text and captured, and `stderr` may
            be `subprocess.STDOUT`.

    Returns what became of the last run; its status is not checked.

    Raises:
        subprocess.TimeoutExpired: with what the program had printed.
    """
    for attempt in range(1, _MOST_RUNS + 1):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                command,
                start_new_session=True,  # what stops this one's group must not stop us
                **{"stdout": out, "stderr": err, **settings},
            )
            try:
                limit = idle if attempt < _MOST_RUNS else timeout
                ended = _wait(process, timeout, limit, (out, err))
            finally:
                if process.poll() is None:
                    _kill(process.pid)
                    process.wait()
            printed, said = _read(out), _read(err)
        torch_alone = _OURS not in printed + said and (not ended or _ABORTED in printed + said)
        if torch_alone and process.returncode != 0 and attempt < _MOST_RUNS:
            continue
        if not ended:
            raise subprocess.TimeoutExpired(command, timeout, printed, said)
        break
    return subprocess.CompletedProcess(command, process.returncode, printed, said)


def _wait(
    process: subprocess.Popen[bytes],
    timeout: float,
    idle: float,
    outputs: tuple[IO[bytes], IO[bytes]],
) -> bool:
    """Whether the process ended by itself; neither in time nor, if stock, while it did anything."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        before = _cpu_seconds(process.pid)
        try:
            process.wait(min(idle, left))
        except subprocess.TimeoutExpired:
            after = _cpu_seconds(process.pid)
            spent = sum(after.values()) - sum(before.values())
            # Nobody says how much those spent that ended meanwhile.
            idles = before.keys() <= after.keys() and spent < _IDLE_SHARE * idle
            if idles and not any(_OURS in _read(output) for output in outputs):
                return False
        else:
            return True
    return False


def _cpu_seconds(root: int) -> dict[int, float]:
    """Processor time of a process and its descendants that live."""
    stats = _stats()
    return {
        pid: (int(stats[pid][11]) + int(stats[pid][12])) / _CLOCK_TICKS
        for pid in _family(root, stats)
    }


def _kill(root: int) -> None:
    """With its descendants: launchers give each rank a session of its own."""
    for pid in _family(root, _stats()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _family(root: int, stats: dict[int, list[str]]) -> list[int]:
    family = [root] if root in stats else []
    for parent in family:  # grows while it is read
        family += [pid for pid, fields in stats.items() if int(fields[1]) == parent]
    return family


def _stats() -> dict[int, list[str]]:
    """Return what /proc/PID/stat says of each process from its state on, see proc(5)."""
    stats = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended
                stats[int(folder.name)] = (folder / "stat").read_text().rpartition(") ")[2].split()
    return stats


def _read(output: IO[bytes]) -> str:
    # Not by reading the file: the programs that write to it share its position.
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), size, 0).decode(errors="replace")
