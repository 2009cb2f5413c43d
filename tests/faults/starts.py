"""Starts jobs again and again on a busy machine and says how long the ranks took to meet.

    python tests/faults/starts.py --count 200
    python tests/faults/starts.py --count 20 --ranks 8 --how spawn --busy 8

Each job makes its default group and two more, and passes a few operations through them, natively
and by the stock backend. A start that takes longer than the limit is ended, and what its ranks said
and where they stood is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

import deepytorch

_GROUP_LIMIT_S = 600
_POLL_S = 0.01
# Below those that the system gives out by itself, which other programs are using.
_PORTS = range(15_000, 30_000)


@dataclass(frozen=True)
class Started:
    """One start: how long it took, and what the ranks said if that was too long or went wrong."""

    ranks: int
    took_s: float
    trouble: str


def rank_of(job: Path, rank: int, ranks: int, port: int, limit_s: float) -> None:
    """One rank of a job: starts, computes a little and ends."""
    with (job / f"log{rank}").open("w", buffering=1) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
        faulthandler.dump_traceback_later(0.9 * limit_s, file=log)
        os.environ.update(  # noqa: TID251
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            DEEPYTORCH_PROFILE=str(job / "profile.json"),
        )
        deepytorch.activate()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
        values = [torch.ones(50_000) for _ in groups]
        integers = torch.ones(3, dtype=torch.int16)
        works = [
            dist.all_reduce(value, group=group, async_op=True)
            for value, group in zip(values, groups, strict=True)
        ]
        for work in works:
            work.wait()
        dist.all_reduce(integers, dist.ReduceOp.BAND)
        dist.barrier()
        wrong = [value for value in values if value[0] != ranks]
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        os._exit(1 if wrong else 0)


def start(ranks: int, how: str, limit_s: float) -> Started:
    """Start one job and wait for its end, at most `limit_s` seconds."""
    context = multiprocessing.get_context(how)
    with tempfile.TemporaryDirectory(prefix="deepytorch-starts-") as folder:
        job = Path(folder)
        port = free_port()
        began = time.monotonic()
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            process = context.Process(target=rank_of, args=(job, rank, ranks, port, limit_s))
            process.start()
            processes.append(process)
        while any(child.is_alive() for child in processes) and time.monotonic() - began < limit_s:
            time.sleep(_POLL_S)
        took_s = time.monotonic() - began
        codes = [child.exitcode for child in processes]
        for child in processes:
            child.kill()
            child.join()
        logs = "\n".join(f"-- {log.name}\n{log.read_text()}" for log in sorted(job.glob("log*")))
        trouble = "" if set(codes) == {0} else f"exit codes {codes}\n{logs}"
    return Started(ranks, took_s, trouble)


def free_port() -> int:
    """A port that nobody listens on."""
    while True:
        with socket.socket() as tried, contextlib.suppress(OSError):
            port = random.choice(_PORTS)
            tried.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def busy(count: int):
    """While open, `count` processes compute for nothing."""
    burners = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            while os.getppid() != 1:
                for _ in range(10**6):
                    pass
            os._exit(0)
        burners.append(pid)
    try:
        yield
    finally:
        for pid in burners:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="starts of each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 8])
    parser.add_argument("--how", choices=["fork", "spawn"], default="fork")
    parser.add_argument("--busy", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--limit", type=float, default=20.0, help="seconds; longer is a failure")
    given = parser.parse_args()
    failed = 0
    with busy(given.busy):
        for ranks in given.ranks:
            took = []
            for number in range(given.count):
                found = start(ranks, given.how, given.limit)
                took.append(found.took_s)
                if found.trouble:
                    failed += 1
                    print(
                        f"start {number} of {ranks} ranks: {found.took_s:.1f} s, {found.trouble}",
                        flush=True,
                    )
            print(
                f"{ranks} ranks, {given.count} starts: median {statistics.median(took):.2f} s, "
                f"longest {max(took):.2f} s",
                flush=True,
            )
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
