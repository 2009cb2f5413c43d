"""One rank of `bench collectives`: check both arms' results, then time them interleaved.

Started by `launch.run`; see `worker` for how.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from deepytorch_core.bench import bandwidth, baselines, reference, timing, worker
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


@dataclass(frozen=True)
class Row:
    """One operation of one size: `share` elements of `dtype` a rank, `num_bytes` as nccl-tests."""

    op: Operation
    num_bytes: int
    share: int
    dtype: str
    world_size: int

    @property
    def moves(self) -> bool:
        return self.op.name != "barrier"

    def buffers(self, allocate: Allocate) -> Buffers:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return make_buffers(self.op, self.share, dtype, self.world_size, allocate)


def cases(job: Job) -> Iterator[Row]:
    """The rows of a job, in order."""
    for name in job.ops:
        op = OPERATIONS[name]
        # A barrier has neither size nor type, so it is one row.
        for dtype_name in job.dtypes if name != "barrier" else job.dtypes[:1]:
            dtype: torch.dtype = getattr(torch, dtype_name)
            for asked in job.sizes if name != "barrier" else (0,):
                num_bytes = asked * (job.world_size if job.per_rank and op.split else 1)
                share = share_of(op, num_bytes, dtype, job.world_size)
                exact = bytes_of(op, share, dtype, job.world_size) if name != "barrier" else 0
                yield Row(op, exact, share, dtype_name, job.world_size)


def row_of(
    job: Job,
    row: Row,
    algorithm: str,
    comparison: timing.Comparison,
    wrong: tuple[int, int],
) -> Record:
    """The fields `COLLECTIVE_FIELDS` of `record` that the ranks know; `wrong` is (ours, other)."""
    dtype: torch.dtype = getattr(torch, row.dtype)
    time_us = comparison.time_us
    busbw = bandwidth.busbw_gbps(row.op.name, row.num_bytes, time_us, row.world_size)
    return {
        "op": row.op.name,
        "bytes": row.num_bytes,
        "bytes_per_rank": row.share * dtype.itemsize if row.moves else 0,
        "per_rank": job.per_rank,
        "dtype": row.dtype,
        "world_size": row.world_size,
        "device": job.device,
        "registered": job.registered,
        "direct": job.direct,
        "algorithm": algorithm,
        "time_us": round(time_us, 3),
        "baseline": job.baseline,
        "baseline_time_us": round(comparison.baseline_time_us, 3),
        "speedup": round(comparison.speedup, 3),
        "speedup_spread": [round(value, 3) for value in comparison.spread],
        "num_blocks": comparison.num_blocks,
        "algbw_gbps": round(bandwidth.algbw_gbps(row.num_bytes, time_us), 4),
        "busbw_gbps": round(busbw, 4),
        "wrong": wrong[timing.OURS],
        "baseline_wrong": wrong[timing.BASELINE],
        "emulated": None,  # the launcher knows more
    }


class Bench:
    """Both arms on this rank and the measurement of one row.

    Refers to itself nowhere, so that the groups end with it: a gloo thread that still runs while
    the interpreter ends may abort the process.
    """

    def __init__(self, job: Job, rank: int, store: Store) -> None:
        self._set_up(job, worker.Groups(job, rank, store))
        bind = _to_the_backend(self.groups.device) if job.direct else _through_torch
        self.bind_baseline = (
            bind(self.groups.baseline)
            if job.baseline in baselines.TORCH_BACKENDS
            else baselines.connect(job, rank)
        )

    def _set_up(self, job: Job, groups: worker.Groups) -> None:
        """What an arm needs, be it in one process with the other or apart."""
        self.job = job
        self.groups = groups
        self.ranks = groups.ranks
        bind = _to_the_backend(groups.device) if job.direct else _through_torch
        self.bind_ours = bind(groups.ours)
        self.allocate = _allocate_on(groups.device)
        self.allocate_ours = self._registered_allocate() if job.registered else self.allocate

    def record(self, row: Row) -> Record:
        """Checks and times one row; the same on every rank."""
        op = row.op
        ours, baseline = row.buffers(self.allocate_ours), row.buffers(self.allocate)
        calls = (self.bind_ours(op, ours), self.bind_baseline(op, baseline))
        before = self._calls(op)
        if row.moves:
            wrong = self._check(op, ours, row.share, calls[timing.OURS], arm=timing.OURS)
            baseline_wrong = self._check(
                op, baseline, row.share, calls[timing.BASELINE], arm=timing.BASELINE
            )
        else:
            wrong, baseline_wrong = (self._check_barrier(call) for call in calls)
        comparison = self._time(calls, (ours, baseline))
        algorithm = self._algorithm(op, before)
        return row_of(self.job, row, algorithm, comparison, (wrong, baseline_wrong))

    def _check(
        self, op: Operation, buffers: Buffers, share: int, call: timing.Call, *, arm: int
    ) -> int:
        """Wrong elements over all ranks."""
        reference.fill(buffers.input, self.groups.rank)
        before = self._calls(op)
        call()
        expected = reference.pieces(
            op.name, rank=self.groups.rank, world_size=self.job.world_size, share=share
        )
        # Native sums round once. Others may round after each addition, and so may a sum in a type
        # as wide as the accumulator.
        wide = buffers.output.dtype in (torch.float32, torch.float64)
        native = (
            arm == timing.OURS
            and self.job.ours == "deepytorch"
            and self._algorithm(op, before) != "delegate"
        )
        roundings = 1 if native and not wide else max(1, self.job.world_size - 1)
        wrong = reference.count_wrong(buffers.output, expected, num_roundings=roundings)
        return self.ranks.total(wrong)

    def _check_barrier(self, call: timing.Call) -> int:
        """Ranks that left the barrier before the last one came: 0 if it is one.

        The ranks share a host, so they share the monotonic clock.
        """
        self.ranks.barrier()
        time.sleep(0.02 * (self.groups.rank == self.job.world_size - 1))
        entered = time.monotonic_ns()
        call()
        if self.groups.device.type == "cuda":
            torch.cuda.synchronize()
        left = time.monotonic_ns()
        last = self.ranks.maximum([entered / 1e3])[0]
        return self.ranks.total(int(left / 1e3 < last))

    def _time(
        self, calls: tuple[timing.Call, timing.Call], arms: tuple[Buffers, Buffers]
    ) -> timing.Comparison:
        for buffers in arms:
            # Zeros stay zeros: repeated sums of anything else grow until they overflow.
            buffers.input.zero_()
            buffers.output.zero_()
        blocks = timing.sample(
            calls,
            clock=self.groups.clock,
            ranks=self.ranks,
            iterations=self.job.iterations,
            budget_s=self.job.budget_s,
        )
        return timing.compare(blocks)

    def _registered_allocate(self) -> Allocate:
        device = self.groups.device
        backend = self.groups.ours._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            raise BenchError(
                f"--registered: backend {self.job.ours!r} has no registered memory for "
                f"{device.type} tensors in this version; run without --registered"
            )
        return lambda count, dtype: backend.allocate_tensor(count, dtype=dtype, device=device)

    def _calls(self, op: Operation) -> dict[str, int]:
        return worker.calls_by_algorithm(self.job.ours, op.name)

    def _algorithm(self, op: Operation, before: dict[str, int]) -> str:
        """The algorithm that served most calls since `before`."""
        if self.job.ours != "deepytorch":
            return self.job.ours
        return worker.main_algorithm(before, self._calls(op))


def measure(job: Job, rank: int, store: Store, emit: worker.Emit) -> None:
    """Runs the whole job on this rank; rank 0 gives each row to `emit`.

    Raises BenchError when the job needs what this machine or backend lacks.
    """
    bench = Bench(job, rank, store)
    for row in cases(job):
        record = bench.record(row)
        if rank == 0:
            emit({"record": record})


def _to_the_backend(device: torch.device) -> Callable[[dist.ProcessGroup], baselines.Bind]:
    """Binds to the C++ entry point itself, as a rival's op is called."""

    def bind_group(group: dist.ProcessGroup) -> baselines.Bind:
        backend = group._get_backend(device)

        def bind(op: Operation, buffers: Buffers) -> timing.Call:
            return lambda: op.submit(buffers.input, buffers.output, backend).wait()

        return bind

    return bind_group


def _through_torch(group: dist.ProcessGroup) -> baselines.Bind:
    return lambda op, buffers: lambda: op.call(buffers.input, buffers.output, group)


def _allocate_on(device: torch.device) -> Allocate:
    return lambda count, dtype: torch.empty(count, dtype=dtype, device=device)


if __name__ == "__main__":
    sys.exit(worker.serve(sys.argv[1:], Job, measure))
