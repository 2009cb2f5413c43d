"""Starts the ranks of a benchmark as processes of their own and collects what they measure."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from deepytorch_core.bench.job import BenchError, Job
from deepytorch_core.bench.record import Record, provenance

_WORKER = "deepytorch_core.bench.collectives"
_GRACE_S = 3.0  # how long the other ranks may take to report after the first failure


class WorkerError(RuntimeError):
    """A rank failed; the message holds the traceback of every rank that had one of its own."""


def run(job: Job) -> Iterator[Record]:
    """Measures `job` on processes of this machine; yields each row's record as it is ready.

    What rank 0 printed goes to standard error at the end. Raises BenchError when the job cannot
    run here and WorkerError when a rank fails. No process is left when the iteration ends, however
    it ends.
    """
    origin = provenance()
    if job.ours == "deepytorch":
        from deepytorch_core import adapter

        adapter.load()  # compiled once here, not by every rank against its time limit
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepytorch-bench-")))
        ranks = stack.enter_context(_Ranks(job, folder))
        for message in ranks.messages():
            if "error" in message:
                raise BenchError(message["error"])
            yield {**message["record"], **origin}
        sys.stderr.write(ranks.output(0))  # warnings, said once


class _Ranks:
    """The processes of one run, killed and reaped on exit."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reader = -1

    def __enter__(self) -> "_Ranks":
        self._store = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._job.timeout_s),
        )
        self._reader, writer = os.pipe()
        try:
            for rank in range(self._job.world_size):
                self._processes.append(self._start(rank, writer))
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(writer)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        os.close(self._reader)

    def messages(self) -> Iterator[dict[str, Record]]:
        """What the ranks send until all of them ended; raises WorkerError if one failed."""
        pending = b""
        deadline = float("inf")
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if selector.select(timeout=0.1):
                    data = os.read(self._reader, 1 << 16)
                    if not data:
                        break
                    *lines, pending = (pending + data).split(b"\n")
                    yield from (json.loads(line) for line in lines)
                elif any(process.poll() for process in self._processes):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        self._raise_failures()

    def output(self, rank: int) -> str:
        """What the rank wrote to its standard output and error."""
        return self._log(rank).read_text(errors="replace")

    def _start(self, rank: int, writer: int) -> subprocess.Popen[bytes]:
        arguments = [str(rank), str(self._store.port), str(writer), self._job.to_json()]
        with self._log(rank).open("wb") as log:
            # A session of its own: Ctrl-C reaches the launcher only, which then ends the ranks.
            return subprocess.Popen(
                [sys.executable, "-m", _WORKER, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                start_new_session=True,
            )

    def _raise_failures(self) -> None:
        statuses: dict[int, int | None] = {}
        for rank, process in enumerate(self._processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE_S)
            statuses[rank] = process.poll()
        failed = {rank: status for rank, status in statuses.items() if status}
        stuck = [rank for rank, status in statuses.items() if status is None]
        if not failed and not stuck:
            return
        parts = [
            f"rank {rank} {_describe(status)}:\n{self.output(rank)}"
            for rank, status in failed.items()
        ]
        if stuck:
            parts.append(f"still waiting when the run was ended: ranks {stuck}")
        raise WorkerError("\n".join(parts).rstrip())

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


def _describe(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"failed with status {status}"
