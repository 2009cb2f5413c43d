"""How the ranks of one node find each other when their launcher gives no address: in a folder.

The folder belongs to the user, is named after the job and goes with rank 0, unless that is killed.
A file is a key: a line about its writer, then the value. What earlier processes of the same job
left there, such as those that torchrun has started again, is not seen; nor is what these processes
left when they met before, between a `shutdown` and an `init`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from deepytorch.integrations.common.contract import IntegrationError
from deepytorch_core.base import config
from deepytorch_core.base.launchers import Launched

_PAUSE_S = 0.002
_meetings: Counter[Path] = Counter()


class LocalStore:
    """Keys and values that the processes of one job on this node share, those of one meeting."""

    def __init__(self, folder: Path, meeting: int = 1) -> None:
        self._folder, self._meeting = folder, meeting

    def set(self, key: str, value: bytes) -> None:
        """Set a key; readers see the old value or the new one, never a part."""
        writer = f"{os.getpid()} {_start_of(os.getpid()) or 0} {_now()}\n"
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=".")
        with os.fdopen(descriptor, "wb") as file:
            file.write(writer.encode() + value)
        os.replace(name, self._path(key))

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        """The value, waited for up to `timeout_ms`; None when it is still absent then.

        A value of a process that ended is seen if it was set since this process began. So a rank
        that waits for the other process learns that it has ended.
        """
        began = _start_of(os.getpid()) or 0
        return self._await(key, timeout_ms / 1e3, lambda set_at: set_at > began)

    def get_alive(self, key: str, timeout_s: float) -> bytes | None:
        """The value of a writer that lives; None when there is none in time."""
        return self._await(key, timeout_s, lambda set_at: False)

    def _await(self, key: str, timeout_s: float, counts: Callable[[int], bool]) -> bytes | None:
        """A value whose writer lives, or that was set at a time that `counts`."""
        end = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(FileNotFoundError):
                writer, _, value = self._path(key).read_bytes().partition(b"\n")
                pid, start, set_at = map(int, writer.split())
                if counts(set_at) or _start_of(pid) == start:
                    return value
            if time.monotonic() >= end:
                return None
            time.sleep(_PAUSE_S)

    def remove_at_exit(self) -> None:
        """Remove the folder when this process ends; for rank 0."""
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self._folder / urllib.parse.quote(f"{self._meeting}/{key}", safe="")


def local_store(launched: Launched, framework: str) -> LocalStore:
    """The store that this node's processes of the job share; one for each time that they meet.

    Raises IntegrationError when the folder is another user's.
    """
    job = launched.job or f"child-of-{os.getppid()}"
    address = config.rendezvous_address()
    if launched.launcher == "torchrun" and address is not None:
        # Its jobs are all called "none" unless told otherwise. The parent would tell them apart
        # too, but a rank that a shell script starts has a parent of its own.
        job = f"{job}-{address[1]}"
    user = os.getuid()
    name = urllib.parse.quote(f"{launched.launcher}-{job}-{framework}", safe="")
    folder = config.temporary_dir() / f"deepytorch-{user}" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent.stat().st_uid != user or folder.parent.stat().st_mode & 0o022:
        raise IntegrationError(
            f"horovod: {folder.parent} can be written by others: remove it, or set TMPDIR"
        )
    _meetings[folder] += 1
    return LocalStore(folder, _meetings[folder])


def require_one_node(launched: Launched, remedy: str) -> None:
    """Raise IntegrationError unless all ranks are on this node, as far as the launcher says."""
    if launched.local_size not in (None, launched.size):
        raise IntegrationError(
            f"horovod: {launched.size} ranks, {launched.local_size} of them on this node: {remedy}"
        )


def _now() -> int:
    """In clock ticks since the machine began, as for `_start_of`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _start_of(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
