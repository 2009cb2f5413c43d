"""One rank of `bench collectives`: check the results, then time both arms interleaved.

Started by `launch.run` as `python -m deepytorch_core.bench.collectives RANK PORT FD JOB`. Rank 0
writes one JSON line per row to the file descriptor FD. Standard input is a pipe that nobody writes
to: its end means that the launcher is gone.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from deepytorch_core.bench import bandwidth, reference, timing
from deepytorch_core.bench.job import BenchError, Job
from deepytorch_core.bench.ops import (
    OPERATIONS,
    Allocate,
    Buffers,
    Operation,
    bytes_of,
    make_buffers,
    share_of,
)
from deepytorch_core.bench.record import Record

REFUSED = 2  # exit status of a rank that was asked for something it cannot do

Emit = Callable[[dict[str, Any]], None]


class Ranks:
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


class Bench:
    """The groups of both arms on this rank and the measurement of one row.

    Refers to itself nowhere, so that the groups end with it: a gloo thread that still runs while
    the interpreter ends may abort the process.
    """

    def __init__(self, job: Job, rank: int, store: Store) -> None:
        self.job = job
        self.rank = rank
        self.device = (
            torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
        )
        if job.ours == "deepytorch":
            from deepytorch_core import backend

            backend.register()
        timeout = timedelta(seconds=job.timeout_s)
        dist.init_process_group(
            job.baseline, store=store, rank=rank, world_size=job.world_size, timeout=timeout
        )
        self.baseline = _world(job.baseline)
        self.ours: dist.ProcessGroup = dist.new_group(backend=job.ours, timeout=timeout)
        self.ranks = Ranks(dist.new_group(backend="gloo", timeout=timeout))
        self.clock: timing.Clock = _cuda_clock if job.device == "cuda" else timing.wall_clock
        self.allocate = _allocate_on(self.device)
        self.allocate_ours = self._registered_allocate() if job.registered else self.allocate

    def row(self, op: Operation, num_bytes: int, dtype_name: str) -> Record:
        """Checks and times one operation of one size; the same on every rank."""
        job, world_size = self.job, self.job.world_size
        dtype: torch.dtype = getattr(torch, dtype_name)
        share = share_of(op, num_bytes, dtype, world_size)
        shape = (op, share, dtype, world_size)
        num_bytes = bytes_of(*shape) if op.name != "barrier" else 0
        buffers = make_buffers(*shape, self.allocate_ours)
        before = self._calls(op)
        wrong = self._check_barrier(op) if op.name == "barrier" else self._check(op, buffers, share)
        comparison = self._time(op, buffers, make_buffers(*shape, self.allocate))
        return {
            "op": op.name,
            "bytes": num_bytes,
            "dtype": dtype_name,
            "world_size": world_size,
            "device": job.device,
            "registered": job.registered,
            "algorithm": self._algorithm(op, before),
            "time_us": round(comparison.time_us, 3),
            "baseline": job.baseline,
            "baseline_time_us": round(comparison.baseline_time_us, 3),
            "speedup": round(comparison.speedup, 3),
            "speedup_spread": [round(value, 3) for value in comparison.spread],
            "algbw_gbps": round(bandwidth.algbw_gbps(num_bytes, comparison.time_us), 4),
            "busbw_gbps": round(
                bandwidth.busbw_gbps(op.name, num_bytes, comparison.time_us, world_size), 4
            ),
            "wrong": wrong,
        }

    def _check(self, op: Operation, buffers: Buffers, share: int) -> int:
        """Wrong elements over all ranks."""
        reference.fill(buffers.input, self.rank)
        before = self._calls(op)
        op.call(buffers.input, buffers.output, self.ours)
        expected = reference.pieces(
            op.name, rank=self.rank, world_size=self.job.world_size, share=share
        )
        # Native sums round once. The delegate may round after each addition, and so may a sum in a
        # type as wide as the accumulator.
        wide = buffers.output.dtype in (torch.float32, torch.float64)
        native = self.job.ours == "deepytorch" and self._algorithm(op, before) != "delegate"
        roundings = 1 if native and not wide else max(1, self.job.world_size - 1)
        wrong = reference.count_wrong(buffers.output, expected, num_roundings=roundings)
        return self.ranks.total(wrong)

    def _check_barrier(self, op: Operation) -> int:
        """Ranks that left the barrier before the last one came: 0 if it is one.

        The ranks share a host, so they share the monotonic clock.
        """
        token = torch.empty(0)
        self.ranks.barrier()
        time.sleep(0.02 * (self.rank == self.job.world_size - 1))
        entered = time.monotonic_ns()
        op.call(token, token, self.ours)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        left = time.monotonic_ns()
        last = self.ranks.maximum([entered / 1e3])[0]
        return self.ranks.total(int(left / 1e3 < last))

    def _time(self, op: Operation, ours: Buffers, baseline: Buffers) -> timing.Comparison:
        for buffers in (ours, baseline):
            # Zeros stay zeros: repeated sums of anything else grow until they overflow.
            buffers.input.zero_()
            buffers.output.zero_()
        blocks = timing.sample(
            (
                lambda: op.call(ours.input, ours.output, self.ours),
                lambda: op.call(baseline.input, baseline.output, self.baseline),
            ),
            clock=self.clock,
            ranks=self.ranks,
            iterations=self.job.iterations,
            budget_s=self.job.budget_s,
        )
        return timing.compare(blocks)

    def _registered_allocate(self) -> Allocate:
        device = self.device
        backend = self.ours._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            raise BenchError(
                f"--registered: backend {self.job.ours!r} has no registered memory for "
                f"{device.type} tensors in this version; run without --registered"
            )
        return lambda count, dtype: backend.allocate_tensor(count, dtype=dtype, device=device)

    def _calls(self, op: Operation) -> dict[str, int]:
        """Calls of `op` so far by algorithm."""
        if self.job.ours != "deepytorch":
            return {}
        from deepytorch_core import _core

        calls: dict[str, int] = {}
        for entry in _core.statistics():
            if entry["op"] == op.name:
                name = str(entry["algorithm"])
                calls[name] = calls.get(name, 0) + int(entry["calls"])
        return calls

    def _algorithm(self, op: Operation, before: dict[str, int]) -> str:
        """The algorithm that served most calls since `before`."""
        if self.job.ours != "deepytorch":
            return self.job.ours
        grown = {name: n - before.get(name, 0) for name, n in self._calls(op).items()}
        return max(grown, key=lambda name: grown[name], default="unknown")


def measure(job: Job, rank: int, store: Store, emit: Emit) -> None:
    """Runs the whole job on this rank; rank 0 gives each row to `emit`.

    Raises BenchError when the job needs what this machine or backend lacks.
    """
    torch.set_num_threads(1)
    if job.device == "cuda":
        if torch.cuda.device_count() < job.world_size:
            raise BenchError(
                f"--world-size {job.world_size} needs as many GPUs; "
                f"this machine has {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(rank)
    bench = Bench(job, rank, store)
    for name in job.ops:
        op = OPERATIONS[name]
        # A barrier has neither size nor type, so it is one row.
        for dtype in job.dtypes if name != "barrier" else job.dtypes[:1]:
            for num_bytes in job.sizes if name != "barrier" else (0,):
                record = bench.row(op, num_bytes, dtype)
                if rank == 0:
                    emit({"record": record})
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """Entry point of a rank's process; see the top of the file."""
    rank, port, fd = (int(text) for text in arguments[:3])
    job = Job.from_json(arguments[3])
    threading.Thread(target=_exit_with_launcher, daemon=True).start()

    def emit(message: dict[str, Any]) -> None:
        os.write(fd, (json.dumps(message) + "\n").encode())

    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        measure(job, rank, store, emit)
    except BenchError as error:
        emit({"error": str(error)})
        return REFUSED
    return 0


def _allocate_on(device: torch.device) -> Allocate:
    return lambda count, dtype: torch.empty(count, dtype=dtype, device=device)


def _world(name: str) -> dist.ProcessGroup:
    """The default group; a baseline that something replaced would compare us with ourselves."""
    group = dist.group.WORLD
    assert group is not None
    actual = dist.get_backend(group)
    if actual != name:
        raise BenchError(f"the baseline {name!r} was replaced by {actual!r} in this process")
    return group


def _cuda_clock(call: timing.Call, repetitions: int) -> list[float]:
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


def _exit_with_launcher() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
