"""One rank of `bench collectives`: check both arms' results, then time them interleaved.

Started by `launch.run`; see `worker` for how.
"""

import sys
import time
from collections.abc import Callable

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


class Bench:
    """Both arms on this rank and the measurement of one row.

    Refers to itself nowhere, so that the groups end with it: a gloo thread that still runs while
    the interpreter ends may abort the process.
    """

    def __init__(self, job: Job, rank: int, store: Store) -> None:
        self.job = job
        self.groups = worker.Groups(job, rank, store)
        self.ranks = self.groups.ranks
        bind = _to_the_backend(self.groups.device) if job.direct else _through_torch
        self.bind_ours = bind(self.groups.ours)
        self.bind_baseline = (
            bind(self.groups.baseline)
            if job.baseline in baselines.TORCH_BACKENDS
            else baselines.connect(job, rank)
        )
        self.allocate = _allocate_on(self.groups.device)
        self.allocate_ours = self._registered_allocate() if job.registered else self.allocate

    def row(self, op: Operation, num_bytes: int, dtype_name: str) -> Record:
        """Checks and times one operation of one size; the same on every rank."""
        job, world_size = self.job, self.job.world_size
        dtype: torch.dtype = getattr(torch, dtype_name)
        if job.per_rank:
            num_bytes *= world_size if op.split else 1
        share = share_of(op, num_bytes, dtype, world_size)
        shape = (op, share, dtype, world_size)
        moves = op.name != "barrier"
        num_bytes = bytes_of(*shape) if moves else 0
        ours = make_buffers(*shape, self.allocate_ours)
        baseline = make_buffers(*shape, self.allocate)
        calls = (self.bind_ours(op, ours), self.bind_baseline(op, baseline))
        before = self._calls(op)
        if moves:
            wrong = self._check(op, ours, share, calls[timing.OURS], arm=timing.OURS)
            baseline_wrong = self._check(
                op, baseline, share, calls[timing.BASELINE], arm=timing.BASELINE
            )
        else:
            wrong, baseline_wrong = (self._check_barrier(call) for call in calls)
        comparison = self._time(calls, (ours, baseline))
        return {
            "op": op.name,
            "bytes": num_bytes,
            "bytes_per_rank": share * dtype.itemsize if moves else 0,
            "per_rank": job.per_rank,
            "dtype": dtype_name,
            "world_size": world_size,
            "device": job.device,
            "registered": job.registered,
            "direct": job.direct,
            "algorithm": self._algorithm(op, before),
            "time_us": round(comparison.time_us, 3),
            "baseline": job.baseline,
            "baseline_time_us": round(comparison.baseline_time_us, 3),
            "speedup": round(comparison.speedup, 3),
            "speedup_spread": [round(value, 3) for value in comparison.spread],
            "num_blocks": comparison.num_blocks,
            "algbw_gbps": round(bandwidth.algbw_gbps(num_bytes, comparison.time_us), 4),
            "busbw_gbps": round(
                bandwidth.busbw_gbps(op.name, num_bytes, comparison.time_us, world_size), 4
            ),
            "wrong": wrong,
            "baseline_wrong": baseline_wrong,
            "emulated": None,  # the launcher knows more
        }

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
    for name in job.ops:
        op = OPERATIONS[name]
        # A barrier has neither size nor type, so it is one row.
        for dtype in job.dtypes if name != "barrier" else job.dtypes[:1]:
            for num_bytes in job.sizes if name != "barrier" else (0,):
                record = bench.row(op, num_bytes, dtype)
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
