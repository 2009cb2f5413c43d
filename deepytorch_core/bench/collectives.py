"""One rank of `bench collectives`: check both arms' results, then time them interleaved.

Started by `launch.run`; see `worker` for how.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from deepytorch_core.base import config
from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import (
    baselines,
    beside,
    graphs,
    memory,
    reference,
    rivals,
    timing,
    worker,
)
from deepytorch_core.bench.baselines.arm import Prepare, TimedArm
from deepytorch_core.bench.job import BenchError, CollectivesJob
from deepytorch_core.bench.ops import Allocate, Buffers, Collective
from deepytorch_core.bench.rows import Row, RowMeasurement, cases, row_of
from deepytorch_core.c10d import device_memory

GRAPH_BUDGET_S = 0.6  # of a row's replays
OTHER = "other"  # an algorithm that is not ours


@dataclass
class ArmPair:
    """Both arms of a row, (ours, baseline), and how many of their elements were wrong so far.

    With `products` what is timed runs beside them.
    """

    trials: tuple[TimedArm, TimedArm]
    wrong: list[int] = field(default_factory=lambda: [0, 0])
    products: beside.Products | None = None

    @property
    def calls(self) -> tuple[timing.Call, timing.Call]:
        ours, baseline = (trial.call for trial in self.trials)
        if self.products is None:
            return ours, baseline
        return self.products.beside(ours), self.products.beside(baseline)

    def zero(self) -> None:
        """Zeros stay zeros: repeated sums of anything else grow until they overflow."""
        for trial in self.trials:
            trial.buffers.input.zero_()
            trial.buffers.output.zero_()


class Bench:
    """Both arms on this rank and the measurement of one row.

    Refers to itself nowhere, so that the groups end with it: a gloo thread that still runs while
    the interpreter ends may abort the process.
    """

    def __init__(
        self, job: CollectivesJob, rank: int, store: Store, cleanup: contextlib.ExitStack
    ) -> None:
        """`cleanup` is closed by the caller, on all ranks, when the last row is done."""
        self._set_up(job, worker.Groups(job, rank, store))
        rows = list(cases(job))
        if self.groups.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.groups.device)
            memory.refuse_too_large(rows, free, self.ranks)
        bind = self._binder(self.groups.baseline)
        self.prepare_ours = self._in_memory(rows, self.bind_ours, self.allocate_ours)
        if job.baseline in rivals.PEER_MEMORY:
            measure = functools.partial(self.graphs.about, in_graph=job.cuda_graph)
            connected = baselines.connected(job, self.groups, rows, bind, measure)
            self.prepare_baseline = cleanup.enter_context(connected)
        else:
            if job.baseline not in rivals.TORCH_BACKENDS:
                bind = baselines.connect(job, rank)
            self.prepare_baseline = self._in_memory(rows, bind, self.allocate)

    def _set_up(self, job: CollectivesJob, groups: worker.Groups) -> None:
        """Set up what an arm needs, be it in one process with the other or apart."""
        self.job = job
        self.groups = groups
        self.ranks = groups.ranks
        self.graphs = graphs.Graphs(groups.clock, groups.ranks, graphs.capture)
        self.bind_ours = self._binder(groups.ours)
        self.allocate = _allocate_on(groups.device)
        self.arena: memory.Arena | None = None
        self.allocate_ours = self._registered_allocate() if job.registered else self.allocate

    def record(self, row: Row) -> Record:
        """Checks and times one row; the same on every rank."""
        # Their buffers outlive every graph of the row.
        pair = ArmPair((self.prepare_ours(row), self.prepare_baseline(row)))
        before = self._calls(row.op)
        if row.moves:
            pair.wrong = [
                self._check(row, trial.buffers, trial.call, algorithm=algorithm)
                for trial, algorithm in zip(pair.trials, (None, OTHER), strict=True)
            ]
        else:
            pair.wrong = [self._check_barrier(trial.call) for trial in pair.trials]
        if self.job.beside_compute:
            pair.zero()
            about = functools.partial(self.graphs.about, in_graph=self.job.cuda_graph)
            pair.products = beside.lasting(about(pair.calls[timing.BASELINE]), about)
        if self.job.cuda_graph:
            measured = self._in_graphs(row, pair)
        else:
            measured = self._call_by_call(row, pair, before)
        if pair.products is not None:
            measured = replace(measured, compute_us=pair.products.time_us)
        return row_of(self.job, row, measured)

    def _call_by_call(self, row: Row, pair: ArmPair, before: dict[str, int]) -> RowMeasurement:
        """Times calls from the CPU; on GPUs also what a call costs the CPU."""
        pair.zero()
        blocks = timing.sample(
            pair.calls,
            clock=self.groups.clock,
            ranks=self.ranks,
            iterations=self.job.iterations,
            budget_s=self.job.budget_s,
        )
        comparison = timing.compare(blocks)
        ways = (self._algorithm(row.op, before), pair.trials[timing.BASELINE].way)
        cpu_us = None
        if self.groups.device.type == "cuda" and pair.products is None:
            schedule = timing.enqueueing(max(comparison.time_us, comparison.baseline_time_us))
            clock = worker.enqueue_clock
            cpu = timing.compare(timing.follow(schedule, pair.calls, clock=clock, ranks=self.ranks))
            cpu_us = (cpu.time_us, cpu.baseline_time_us)
        return RowMeasurement(comparison, (pair.wrong[0], pair.wrong[1]), ways, cpu_us=cpu_us)

    def _in_graphs(self, row: Row, pair: ArmPair) -> RowMeasurement:
        """Checks what replays give, then times replays."""
        pair.zero()
        probes = timing.probe(pair.calls, clock=self.groups.clock, ranks=self.ranks)
        count = graphs.calls_per_graph(min(probes))
        # Sums in place grow from call to call, so of them a graph of one is checked.
        checked = count if graphs.is_idempotent(row.op) else 1
        with self._captured(row, pair, checked) as (replays, algorithm):
            for arm, name in enumerate((algorithm, OTHER)):
                buffers = pair.trials[arm].buffers
                pair.wrong[arm] += self._check(row, buffers, replays[arm], algorithm=name)
        pair.zero()
        with self._captured(row, pair, count) as (replays, algorithm):
            blocks = timing.sample(
                replays,
                clock=self.groups.clock,
                ranks=self.ranks,
                iterations=self.job.iterations,
                budget_s=min(self.job.budget_s, GRAPH_BUDGET_S),
                pace=timing.REPLAYS,
            )
        return RowMeasurement(
            timing.compare(timing.divided(blocks, count)),
            (pair.wrong[0], pair.wrong[1]),
            (algorithm, pair.trials[timing.BASELINE].way),
            calls_per_graph=count,
        )

    @contextlib.contextmanager
    def _captured(
        self, row: Row, pair: ArmPair, count: int
    ) -> Iterator[tuple[tuple[timing.Call, timing.Call], str]]:
        """Replays of both arms' graphs of `count` calls, and the algorithm captured of ours."""
        before = self._calls(row.op)
        with self.graphs.captured(pair.calls[timing.OURS], count) as ours:
            algorithm = self._algorithm(row.op, before)
            with self.graphs.captured(pair.calls[timing.BASELINE], count) as baseline:
                yield (ours.replay, baseline.replay), algorithm

    def _check(
        self, row: Row, buffers: Buffers, call: timing.Call, *, algorithm: str | None
    ) -> int:
        """Wrong elements over all ranks after one call.

        `algorithm` is the one that serves it; None is what our backend counts meanwhile.
        """
        reference.fill(buffers.input, self.groups.rank)
        if not row.op.in_place:
            buffers.output.zero_()  # an earlier right result is none of this call
        before = self._calls(row.op)
        call()
        name = self._algorithm(row.op, before) if algorithm is None else algorithm
        expected = reference.pieces(
            row.op.name, rank=self.groups.rank, world_size=row.world_size, share=row.share
        )
        roundings = reference.num_roundings(
            row.torch_dtype,
            row.world_size,
            native=self.job.ours == "deepytorch" and name not in self._by_others(row.op),
            between_nodes=len({seat.node for seat in self.job.seats}) > 1,
        )
        wrong = reference.count_wrong(buffers.output, expected, num_roundings=roundings)
        return self.ranks.total(wrong)

    def _by_others(self, op: Collective) -> set[str]:
        """Our algorithms in which the stock backend adds up."""
        names = {OTHER, "delegate"}
        if self.groups.device.type == "cuda":
            names.add("hierarchical")  # its stages
            if op.name == "all_reduce" and config.current().tune == "force":
                names.add("cpu_reduce")  # of which it may have a part
        return names

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

    def _in_memory(self, rows: Sequence[Row], bind: rivals.Bind, allocate: Allocate) -> Prepare:
        """Arms with tensors of `allocate`."""
        buffers_of: Callable[[Row], Buffers]
        if self.groups.device.type == "cuda" and allocate is self.allocate:
            # The same for both arms: where a buffer lies is worth some percent on a GPU.
            self.arena = self.arena or memory.Arena(rows, allocate)
            buffers_of = self.arena.buffers
        else:

            def buffers_of(row: Row) -> Buffers:
                return row.buffers(allocate)

        def prepare(row: Row) -> TimedArm:
            buffers = buffers_of(row)
            return TimedArm(bind(row.op, buffers), buffers)

        return prepare

    def _binder(self, group: dist.ProcessGroup) -> rivals.Bind:
        if self.job.direct:
            return _to_the_backend(group._get_backend(self.groups.device))
        return lambda op, buffers: lambda: op.call(buffers.input, buffers.output, group)

    def _registered_allocate(self) -> Allocate:
        device = self.groups.device
        if device.type == "cuda":  # what a program asks for; the group itself may give NCCL's
            return lambda count, dtype: device_memory.empty(count, dtype=dtype, device=device)
        backend = self.groups.ours._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            raise BenchError(
                f"--registered: backend {self.job.ours!r} has no registered memory for "
                f"{device.type} tensors in this version; run without --registered"
            )
        return lambda count, dtype: backend.allocate_tensor(count, dtype=dtype, device=device)

    def _calls(self, op: Collective) -> dict[str, int]:
        return worker.calls_by_algorithm(self.job.ours, op.name)

    def _algorithm(self, op: Collective, before: dict[str, int]) -> str:
        """The algorithm that served most calls since `before`."""
        if self.job.ours != "deepytorch":
            return self.job.ours
        return worker.main_algorithm(before, self._calls(op))


def measure(job: CollectivesJob, rank: int, store: Store, emit: worker.Emit) -> None:
    """Runs the whole job on this rank; rank 0 gives each row to `emit`.

    Raises BenchError when the job needs what this machine or backend lacks.
    """
    with contextlib.ExitStack() as cleanup:
        bench = Bench(job, rank, store, cleanup)
        for row in cases(job):
            record = bench.record(row)
            if rank == 0:
                emit({"record": record})


def _to_the_backend(backend: Any) -> rivals.Bind:
    """Binds to the C++ entry point itself, as a rival's op is called."""
    return lambda op, buffers: lambda: op.submit(buffers.input, buffers.output, backend).wait()


def _allocate_on(device: torch.device) -> Allocate:
    return lambda count, dtype: torch.empty(count, dtype=dtype, device=device)


if __name__ == "__main__":
    sys.exit(worker.serve(sys.argv[1:], CollectivesJob, measure))
