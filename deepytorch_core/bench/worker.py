"""One rank of a benchmark: how it meets the others, talks to the launcher and ends with it.

Started by `launch.run` as `python -m MODULE RANK STORE PIPE JOB`. STORE is the rendezvous store's
HOST:PORT, PIPE a named pipe that takes JSON lines. Only the launcher reads the pipe, so when it has
no reader any more the launcher is gone.
"""

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from deepytorch_core.base import config
from deepytorch_core.bench import timing
from deepytorch_core.bench.job import BenchError, Run
from deepytorch_core.bench.rivals import LIMITS
from deepytorch_core.c10d import patches as c10d_patches

REFUSED = 2  # exit status of a rank that was asked for something it cannot do

Emit = Callable[[dict[str, Any]], None]


class GroupAgreement:
    """A `timing.Agreement` over a group of its own, which neither arm uses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def maximum(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, value: int) -> int:
        return round(self._reduce([float(value)], dist.ReduceOp.SUM)[0])

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=op, group=self._group)
        return [float(value) for value in tensor.tolist()]


class Groups:
    """The groups of both arms on this rank, and one for the measurement itself.

    `baseline` is of the backend that the baseline is, or that its processes have.
    """

    ours: dist.ProcessGroup
    baseline: dist.ProcessGroup

    def __init__(self, job: Run, rank: int, store: Store) -> None:
        name = LIMITS[job.baseline].backend
        self._start(job, rank, store, name)
        self.baseline = _world(name)
        timeout = timedelta(seconds=job.timeout_s)
        self.ours = dist.new_group(backend=job.ours, timeout=timeout)

    @classmethod
    def of_one(cls, job: Run, rank: int, store: Store, name: str) -> Self:
        """The groups of one arm alone: the default group, of backend `name`, is in both places."""
        groups = cls.__new__(cls)
        groups._start(job, rank, store, name)
        groups.ours = groups.baseline = _world(name)
        return groups

    def _start(self, job: Run, rank: int, store: Store, name: str) -> None:
        self.rank = rank
        self.device = device_of(job, rank)
        if job.ours == "deepytorch":
            from deepytorch_core.c10d import backend

            backend.register()
        timeout = timedelta(seconds=job.timeout_s)
        dist.init_process_group(
            name, store=store, rank=rank, world_size=job.world_size, timeout=timeout
        )
        self.ranks = GroupAgreement(dist.new_group(backend="gloo", timeout=timeout))
        self.clock: timing.Clock = cuda_clock if job.device == "cuda" else timing.wall_clock


def calls_by_algorithm(ours: str, op: str) -> dict[str, int]:
    """Calls of `op` so far, by the algorithm that served them; {} for another backend than ours."""
    if ours != "deepytorch":
        return {}
    from deepytorch_core import _core

    calls: dict[str, int] = {}
    for entry in _core.statistics():
        if entry["op"] == op:
            name = str(entry["algorithm"])
            calls[name] = calls.get(name, 0) + int(entry["calls"])
    return calls


def main_algorithm(before: dict[str, int], after: dict[str, int]) -> str:
    """The algorithm that served most calls between the two counts."""
    grown = {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}
    return max(grown, key=lambda name: grown[name], default="unknown")


def serve(
    arguments: Sequence[str],
    job_type: type[Run],
    measure: Callable[[Any, int, Store, Emit], None],
) -> int:
    """A rank's process from its arguments to its exit status; see the top of the file."""
    rank = int(arguments[0])
    host, _, port = arguments[1].rpartition(":")
    # Not blocking: without a launcher it would wait for one.
    pipe = os.open(arguments[2], os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    threading.Thread(target=_exit_with_launcher, args=(pipe,), daemon=True).start()
    job = job_type.from_json(arguments[3])

    def emit(message: dict[str, Any]) -> None:
        os.write(pipe, (json.dumps(message) + "\n").encode())

    # Both arms compute and reduce with one core per rank.
    torch.set_num_threads(1)
    try:
        store = TCPStore(host, int(port), is_master=False)
        measure(job, rank, store, emit)
    except BenchError as error:
        emit({"error": str(error)})
        return REFUSED
    dist.destroy_process_group()
    return 0


def leave(status: int) -> NoReturn:
    """End this process at once.

    Models hold on to their groups. A gloo group of torch's own that lives on to the interpreter's
    end now and then takes the process down there.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def device_of(job: Run, rank: int) -> torch.device:
    """The rank's device, made current; raises BenchError when the machine has too few.

    A rank with a GPU keeps to its part of the cores, the same in both arms. On cores of their own
    choice, processes that do the same were seen to differ by 17% where steps wait for the CPU.
    """
    if job.device != "cuda":
        return torch.device("cpu")
    found = torch.cuda.device_count()
    device = job.device_number(rank, found)
    if found < job.world_size and not _is_mps_on():
        raise BenchError(
            f"the nodes' {job.world_size} ranks share {found} GPUs, each of which runs one process "
            "at a time without NVIDIA MPS: start it with nvidia-cuda-mps-control -d"
        )
    torch.cuda.set_device(device)
    if cores := cores_of(rank, job.world_size, sorted(os.sched_getaffinity(0))):
        os.sched_setaffinity(0, cores)
    return torch.device("cuda", device)


def _is_mps_on() -> bool:
    """Whether processes find NVIDIA's Multi-Process Service, by the pipes of its daemon."""
    where = config.child_environment().get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return any(Path(where).glob("*control*"))


def cores_of(rank: int, world_size: int, cores: Sequence[int]) -> Sequence[int]:
    """The rank's part of the cores, as many for each; none where there are too few."""
    share = len(cores) // world_size
    return cores[rank * share : (rank + 1) * share]


def _world(name: str) -> dist.ProcessGroup:
    """The default group; a baseline that something replaced would compare us with ourselves."""
    group = dist.group.WORLD
    assert group is not None
    actual = c10d_patches.serving_name(group)
    if actual != name:
        raise BenchError(f"the baseline {name!r} was replaced by {actual!r} in this process")
    return group


def cuda_clock(call: timing.Call, repetitions: int) -> list[float]:
    """A `timing.Clock` for calls that enqueue work on the current stream."""
    # Untyped in torch.
    event_type: Any = torch.cuda.Event
    events = [event_type(enable_timing=True) for _ in range(repetitions + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    pairs = zip(events, events[1:], strict=False)
    return [float(start.elapsed_time(end)) * 1e3 for start, end in pairs]


def enqueue_clock(call: timing.Call, repetitions: int) -> list[float]:
    """A `timing.Clock` of the CPU: its mean time of a call, while the GPU has little to do."""
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(repetitions):
        call()
    end = time.perf_counter_ns()
    torch.cuda.synchronize()
    return [(end - start) / 1e3 / repetitions]


def _exit_with_launcher(pipe: int) -> None:
    watch = select.poll()
    watch.register(pipe, 0)  # an error, which is what a pipe without a reader has, always counts
    watch.poll()
    os._exit(1)
