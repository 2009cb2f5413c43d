"""Starts the ranks of a benchmark as processes of their own and collects what they measure."""

import contextlib
import dataclasses
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from deepytorch_core.base import config, stores
from deepytorch_core.base.provenance import Record, provenance
from deepytorch_core.bench import baselines, rivals
from deepytorch_core.bench.job import BenchError, Run
from deepytorch_core.testing.emulation import EmulationError, Network

_GRACE_S = 3.0  # how long the other ranks may take to report after the first failure
# Under mpiexec a rank's output still goes to the rank's own file.
_WITH_LOG = ("sh", "-c", 'exec "$@" > "$0" 2>&1')


class TimeLimitError(BenchError):
    """A run was ended because its time was over."""


class WorkerError(RuntimeError):
    """A rank failed; the message holds the traceback of every rank that had one of its own."""


def run(job: Run, *, limit_s: float = math.inf) -> Iterator[Record]:
    """Measures `job` on processes of this machine; yields each row's record as it is ready.

    The output of rank 0 goes to standard error at the end, also where Ctrl-C or SIGTERM is it.
    Raises BenchError when the job cannot run here, and WorkerError when a rank fails. Raises
    TimeLimitError, which is a BenchError, when the job has not ended within `limit_s` seconds. No
    process is left when the iteration ends, however it ends.
    """
    origin = provenance()
    if job.ours == "deepytorch":
        from deepytorch_core.c10d import adapter

        adapter.load()  # compiled once here, not by every rank against its time limit
    with contextlib.ExitStack() as stack:
        setup = stack.enter_context(baselines.prepare(job.baseline, job.world_size))
        origin["versions"] = {**origin["versions"], **setup.versions}
        folder = Path(stack.enter_context(scratch_folder()))
        job = dataclasses.replace(
            job, library=setup.library, scratch=job.scratch or str(folder / "scratch")
        )
        network = _network(job)
        if network is not None and job.nodes is not None:
            stack.enter_context(network)
            origin["emulated"] = {
                **job.nodes.to_dict(),
                **network.to_dict(),
                "separate_processes": job.APART,
            }
            if job.device == "cuda" and len(origin["machine"]["gpus"]) < job.world_size:
                origin["emulated"]["gpus"] = len(origin["machine"]["gpus"])
        ranks = stack.enter_context(_Ranks(job, setup, folder, network))
        stack.enter_context(_ending_at_sigterm())
        try:
            for message in ranks.messages(limit_s):
                if "error" in message:
                    raise BenchError(message["error"])
                settings = {**setup.settings, **job.baseline_settings}
                yield {**message["record"], "baseline_settings": settings, **origin}
        except (KeyboardInterrupt, SystemExit, TimeLimitError):
            sys.stderr.write(ranks.output(0))  # how far it came
            raise
        sys.stderr.write(ranks.output(0))  # warnings, said once


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for as long as a benchmark takes."""
    return tempfile.TemporaryDirectory(prefix="deepytorch-bench-", ignore_cleanup_errors=True)


@contextlib.contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """While open, SIGTERM (of `timeout`, of a batch system) raises SystemExit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _network(job: Run) -> Network | None:
    if job.nodes is None:
        return None
    try:
        return Network(len(job.nodes.ranks_per_node), job.nodes.setting())
    except EmulationError as error:
        raise BenchError(f"--nodes: {error}") from error


class _Ranks:
    """The processes of one run, killed and reaped on exit: the ranks, or mpiexec over them."""

    def __init__(
        self, job: Run, setup: rivals.Setup, folder: Path, network: Network | None = None
    ) -> None:
        self._job = job
        self._network = network
        self._host = "127.0.0.1" if network is None else network.switch_address
        self._setup = setup
        self._folder = folder
        self._pipe = folder / "messages"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[int] = []

    def __enter__(self) -> "_Ranks":
        self._store = self._serve_store()
        self._others = [self._serve_store() for _ in range(self._job.NUM_STORES)]
        os.mkfifo(self._pipe, 0o600)
        # A writing end of our own: the pipe doesn't end before the first rank opens it.
        self._ends = [os.open(self._pipe, os.O_RDONLY | os.O_NONBLOCK)]
        self._ends.append(os.open(self._pipe, os.O_WRONLY))
        try:
            if self._setup.mpiexec is None:
                network, seats = self._network, self._job.seats
                for rank in range(self._job.num_processes):
                    ports = [store.port for store in self._others]
                    variables = dict(self._job.environment(rank, ports))
                    # Several processes of a rank, one for each arm, share its place.
                    node = None if network is None else seats[rank % len(seats)].node
                    if network is not None and "MASTER_ADDR" in variables:
                        variables["MASTER_ADDR"] = network.switch_address
                    self._start(self._command(rank), self._log(rank), variables, node=node)
            else:
                command = self._under_mpiexec(self._setup.mpiexec)
                self._start(command, self._folder / "mpiexec.log", {})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # First the pipe: ranks that are not our own children end when it has no reader.
        for end in self._ends:
            os.close(end)
        for process in self._processes:
            if self._setup.mpiexec is not None:
                # Killed, it could not end its ranks and the helpers between.
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_GRACE_S)
            elif process.poll() is None:  # what it started, too: each is the first of a session
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self._processes:
            process.wait()

    def messages(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """Yield what the ranks send until all of them ended; raises WorkerError if one failed."""
        pending = b""
        deadline, until = math.inf, time.monotonic() + limit_s
        reader = self._ends[0]
        with selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                ended = [process.poll() for process in self._processes]
                if time.monotonic() >= until:
                    raise TimeLimitError(f"it did not end within {limit_s:g} s")
                if selector.select(timeout=0.05):
                    *lines, pending = (pending + os.read(reader, 1 << 16)).split(b"\n")
                    yield from (json.loads(line) for line in lines)
                elif None not in ended:
                    break
                elif any(ended):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        self._raise_failures()

    def output(self, rank: int) -> str:
        """Return what the rank wrote to its standard output and error."""
        log = self._log(rank)
        return log.read_text(errors="replace") if log.exists() else ""

    def _serve_store(self) -> TCPStore:
        def serve() -> TCPStore:
            return stores.serve(self._host, timedelta(seconds=self._job.timeout_s))

        return serve() if self._network is None else self._network.on_switch(serve)

    def _command(self, rank: int) -> list[str]:
        store = f"{self._host}:{self._store.port}"
        arguments = [str(rank), store, str(self._pipe), self._job.to_json()]
        return [sys.executable, "-m", self._job.WORKER, *arguments]

    def _under_mpiexec(self, mpiexec: Path) -> list[str]:
        command = [str(mpiexec), "-launcher", "fork"]
        for rank in range(self._job.world_size):
            command += [":"] if rank else []
            command += ["-n", "1", *_WITH_LOG, str(self._log(rank)), *self._command(rank)]
        return command

    def _start(
        self, command: list[str], log: Path, variables: dict[str, str], *, node: int | None = None
    ) -> None:
        env = config.child_environment(**self._setup.environment, **variables)
        network = None if node is None else self._network
        self._processes.append(_program(command, log, env, network, node or 0))

    def _raise_failures(self) -> None:
        statuses: dict[str, int | None] = {}
        outputs: dict[str, str] = {}
        everyone = range(self._job.world_size)
        for index, process in enumerate(self._processes):
            name = f"rank {index}"
            outputs[name] = self.output(index)
            if self._setup.mpiexec is not None:
                name = "mpiexec"
                logs = [(self._folder / "mpiexec.log").read_text(errors="replace")]
                logs += [f"rank {rank}:\n{self.output(rank)}" for rank in everyone]
                outputs[name] = "\n".join(logs)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE_S)
            statuses[name] = process.poll()
        failed = {name: status for name, status in statuses.items() if status}
        stuck = [name for name, status in statuses.items() if status is None]
        if not failed and not stuck:
            return
        parts = [f"{name} {_describe(status)}:\n{outputs[name]}" for name, status in failed.items()]
        if stuck:
            parts.append(f"still waiting when the run was ended: {', '.join(stuck)}")
        raise WorkerError("\n".join(parts).rstrip())

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


def _describe(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"failed with status {status}"


def _program(
    command: list[str], log: Path, env: dict[str, str], network: Network | None, node: int
) -> subprocess.Popen[bytes]:
    """`command`, running; on that node where there is a network."""
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches the launcher only, which then ends the ranks.
        settings: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
            "env": env,
        }
        if network is None:
            return subprocess.Popen(command, **settings)
        return network.start(node, command, **settings)
