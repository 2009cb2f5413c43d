"""Captured calls: how many, in which order the ranks make graphs, and that replays are checked.

The graphs here only pretend: they call again what they captured, or fail to.
"""

from types import SimpleNamespace

import pytest
import torch

from deepytorch_core.bench import graphs, memory, timing, worker
from deepytorch_core.bench.baselines.arm import TimedArm
from deepytorch_core.bench.collectives import Bench
from deepytorch_core.bench.job import BenchError, CollectivesJob
from deepytorch_core.bench.ops import OPERATIONS, share_bytes
from deepytorch_core.bench.record import COLLECTIVE_FIELDS
from deepytorch_core.bench.rows import RowMeasurement, cases, row_of


class OneRank:
    """An agreement of one rank that notes when it met the others."""

    def __init__(self, log):
        self.log = log

    def barrier(self):
        self.log.append("barrier")

    def maximum(self, values):
        return list(values)

    def total(self, value):
        return value


class FakeGraph:
    """Runs its calls anew at each replay, unless it is broken."""

    def __init__(self, call, count, log, *, broken=False):
        self.call, self.count, self.log, self.broken = call, count, log, broken
        log.append(f"capture {count}")

    def replay(self):
        self.log.append("replay")
        if not self.broken:
            for _ in range(self.count):
                self.call()

    def reset(self):
        self.log.append("reset")


def clock_of(call_us):
    """A clock by which each call or replay takes `call_us`; it runs them."""

    def clock(call, repetitions):
        for _ in range(repetitions):
            call()
        return [call_us] * repetitions

    return clock


def bench_of(job, log, *, call_us=100.0, broken=False):
    """A `Bench` of one rank on CPU tensors whose arms copy their input to their output."""
    bench = Bench.__new__(Bench)
    bench.job = job
    bench.ranks = OneRank(log)
    clock = clock_of(call_us)
    bench.groups = SimpleNamespace(device=torch.device("cpu"), rank=0, clock=clock)
    bench.graphs = graphs.Graphs(
        clock, bench.ranks, lambda call, count: FakeGraph(call, count, log, broken=broken)
    )

    def prepare(row):
        buffers = row.buffers(lambda count, dtype: torch.empty(count, dtype=dtype))

        def call():
            if buffers.output is not buffers.input:
                buffers.output.copy_(buffers.input)

        return TimedArm(call, buffers, "copy")

    bench.prepare_ours = bench.prepare_baseline = prepare
    return bench


def job_of(*ops, **changes):
    fields = {"sizes": (4096,), "dtypes": ("bfloat16",), "world_size": 1, "device": "cuda"}
    fields |= {"baseline": "nccl", "cuda_graph": True, "ours": "nccl"}
    return CollectivesJob(ops=ops, **{**fields, **changes})


@pytest.mark.parametrize(
    ("call_us", "count"), [(0.0, 20), (7.1, 20), (100.0, 10), (329.0, 4), (4541.0, 2)]
)
def test_calls_per_graph(call_us, count):
    assert graphs.calls_per_graph(call_us) == count


def test_only_sums_in_place_change_from_call_to_call():
    growing = [name for name, op in OPERATIONS.items() if not graphs.is_idempotent(op)]
    assert growing == ["all_reduce"]


def test_the_ranks_meet_around_a_graphs_life():
    log = []
    made = graphs.Graphs(clock_of(1.0), OneRank(log), lambda c, n: FakeGraph(c, n, log))
    with made.captured(lambda: log.append("call"), 2) as graph:
        graph.replay()
    life = ["barrier", "capture 2", "barrier", "replay", "call", "call"]
    assert log == [*life, "barrier", "reset", "barrier"]


def test_an_error_does_not_wait_for_the_others():
    log = []
    made = graphs.Graphs(clock_of(1.0), OneRank(log), lambda c, n: FakeGraph(c, n, log))
    with pytest.raises(ValueError, match="mine"), made.captured(lambda: None, 2):
        raise ValueError("mine")
    assert log == ["barrier", "capture 2", "barrier"]


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_row_in_graphs(op):
    log = []
    bench = bench_of(job_of(op), log)
    (row,) = cases(bench.job)
    record = bench.record(row)
    assert set(record) == set(COLLECTIVE_FIELDS) - {
        *("baseline_settings", "machine", "versions", "commit"),
    }
    assert record["cuda_graph"] is True
    assert record["calls_per_graph"] == 10
    assert record["time_us"] == record["baseline_time_us"] == 10.0  # a replay took 100
    assert record["speedup"] == 1.0
    assert record["wrong"] == record["baseline_wrong"] == 0
    assert record["cpu_us"] is None
    assert record["baseline_algorithm"] == "copy"
    assert record["num_blocks"] <= timing.REPLAYS.max_pairs
    captured = [entry for entry in log if entry.startswith("capture")]
    checked = "capture 1" if op == "all_reduce" else "capture 10"
    assert captured == [checked, checked, "capture 10", "capture 10"]
    assert log.count("reset") == 4


def test_replays_that_do_nothing_are_wrong():
    bench = bench_of(job_of("all_gather"), [], broken=True)
    (row,) = cases(bench.job)
    record = bench.record(row)
    assert record["wrong"] == record["baseline_wrong"] == row.share


def test_a_way_is_measured_in_a_graph_when_the_run_is():
    log = []
    made = graphs.Graphs(clock_of(42.0), OneRank(log), lambda c, n: FakeGraph(c, n, log))
    assert made.about(lambda: None, in_graph=False) == 42.0
    assert not log
    assert made.about(lambda: None, in_graph=True) == 42.0 / graphs.PROBED_CALLS
    assert f"capture {graphs.PROBED_CALLS}" in log


def test_blocks_of_replays_are_short_and_few():
    small = timing.plan([150.0, 300.0], iterations=0, budget_s=0.6, pace=timing.REPLAYS)
    assert small == timing.Schedule(25, (20, 10))
    large = timing.plan([9000.0, 9000.0], iterations=0, budget_s=0.6, pace=timing.REPLAYS)
    assert large == timing.Schedule(16, (1, 1))


@pytest.mark.parametrize(("call_us", "depth"), [(7.0, 16), (300.0, 6), (4500.0, 4)])
def test_the_queue_of_enqueued_calls_is_bounded(call_us, depth):
    assert timing.enqueueing(call_us).repetitions == (depth, depth)


def test_times_of_a_replay_are_divided():
    assert timing.divided([[[10.0, 20.0]], [[30.0]]], 10) == [[[1.0, 2.0]], [[3.0]]]


def test_rows_share_their_memory():
    job = job_of("all_reduce", "all_gather", sizes=(64, 4096), world_size=4)
    rows = list(cases(job))
    taken = []

    def allocate(count, dtype):
        taken.append(count * dtype.itemsize)
        return torch.empty(count, dtype=dtype)

    arena = memory.Arena(rows, allocate)
    assert taken == [4096, 4096]
    for row in rows:
        buffers = arena.buffers(row)
        assert buffers.input.dtype == torch.bfloat16
        assert (buffers.input is buffers.output) == row.op.in_place
        sizes = [tensor.numel() * 2 for tensor in (buffers.input, buffers.output)]
        source, target = share_bytes(row.op, row.share, row.torch_dtype, 4)
        assert sizes == [source, target or source]
        assert buffers.input.data_ptr() == arena.places[0].data_ptr()


def test_what_does_not_fit_is_refused_on_all_ranks():
    rows = list(cases(job_of("all_reduce", "all_to_all", sizes=(1024, 8 << 30), world_size=4)))
    memory.refuse_too_large(rows, 64 << 30, OneRank([]))

    class Fuller(OneRank):
        def maximum(self, values):
            return [-float(5 << 30)]  # another rank's GPU has less

    message = r"all_to_all of 8G .* need 34 GiB of each GPU, and one has 5 GiB free: .*--sizes"
    with pytest.raises(BenchError, match=message):
        memory.refuse_too_large(rows, 64 << 30, Fuller([]))


def test_enqueueing_is_timed_apart_from_the_gpu(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("idle"))
    (per_call,) = worker.enqueue_clock(lambda: log.append("call"), 3)
    assert log == ["idle", "call", "call", "call", "idle"]
    assert per_call >= 0


def test_eager_calls_on_gpus_are_timed_twice(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench = bench_of(job_of("all_gather", cuda_graph=False, iterations=1, budget_s=0.01), [])
    bench.groups.device = SimpleNamespace(type="cuda")
    (row,) = cases(bench.job)
    record = bench.record(row)
    assert record["time_us"] == 100.0
    assert record["cpu_us"] > 0
    assert record["baseline_cpu_us"] > 0
    assert record["calls_per_graph"] is None
    assert record["wrong"] == record["baseline_wrong"] == 0


def test_cpu_times_are_in_the_record():
    job = job_of("all_reduce", cuda_graph=False)
    (row,) = cases(job)
    comparison = timing.compare([[[10.0]], [[20.0]]])
    record = row_of(job, row, RowMeasurement(comparison, (0, 0), ("a", ""), cpu_us=(3.21, 0.0)))
    assert (record["cpu_us"], record["baseline_cpu_us"]) == (3.21, 0.0)
    assert record["cuda_graph"] is False
