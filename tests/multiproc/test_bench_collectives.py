"""The benchmark with real ranks, and what is left when it fails or is stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepytorch_core.bench import launch
from deepytorch_core.bench.job import OPERATIONS, BenchError, CollectivesJob
from deepytorch_core.bench.record import COLLECTIVE_FIELDS

pytestmark = pytest.mark.usefixtures("forked_ranks")

TINY = {"sizes": (64, 4096), "dtypes": ("float32",), "world_size": 2, "budget_s": 0.01}


def check(record, job):
    assert set(record) == set(COLLECTIVE_FIELDS)
    assert record["wrong"] == 0
    assert record["baseline_wrong"] == 0
    assert record["baseline"] == job.baseline
    assert record["num_blocks"] >= 5
    assert record["world_size"] == job.world_size
    assert record["time_us"] > 0
    assert record["baseline_time_us"] > 0
    low, high = record["speedup_spread"]
    # The median of the ratios whose quartiles these are.
    assert 0 < low <= record["speedup"] <= high
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["torch"]
    assert record["commit"]


@pytest.mark.extended
def test_every_operation_gloo_against_itself():
    job = CollectivesJob(ops=OPERATIONS, **TINY, ours="gloo")
    records = list(launch.run(job))
    for record in records:
        check(record, job)
        assert record["algorithm"] == "gloo"
    cases = [(op, size) for op in OPERATIONS if op != "barrier" for size in TINY["sizes"]]
    assert [(r["op"], r["bytes"]) for r in records] == [*cases, ("barrier", 0)]


def test_native_operations_name_their_algorithm():
    changes = {"dtypes": ("float32", "bfloat16", "int32")}
    job = CollectivesJob(ops=("all_reduce", "reduce_scatter", "all_to_all"), **{**TINY, **changes})
    algorithms = {}
    for record in launch.run(job):
        check(record, job)
        algorithms.setdefault(record["op"], set()).add(record["algorithm"])
    for names in algorithms.values():
        assert not names & {"delegate", "unknown"}


def test_more_ranks_than_cores_and_sizes_that_do_not_divide():
    job = CollectivesJob(
        ops=("reduce_scatter",), sizes=(1000,), dtypes=("bfloat16",), world_size=3, budget_s=0.01
    )
    (record,) = launch.run(job)
    check(record, job)
    assert record["bytes"] == 996  # 166 elements of 2 bytes on each of 3 ranks
    assert record["bytes_per_rank"] == 332


def test_sizes_per_rank():
    job = CollectivesJob(ops=("all_reduce", "all_gather"), **TINY, per_rank=True)
    records = list(launch.run(job))
    for record in records:
        check(record, job)
    sizes = [(r["op"], r["bytes"], r["bytes_per_rank"]) for r in records]
    assert sizes == [
        ("all_reduce", 64, 64),
        ("all_reduce", 4096, 4096),
        ("all_gather", 128, 64),
        ("all_gather", 8192, 4096),
    ]


def test_registered_tensors_against_ordinary_ones():
    job = CollectivesJob(ops=("all_reduce", "all_gather"), **TINY, registered=True)
    for record in launch.run(job):
        check(record, job)
        assert record["registered"]


def test_direct_calls_of_every_operation():
    job = CollectivesJob(ops=tuple(OPERATIONS), **TINY, direct=True)
    for record in launch.run(job):
        check(record, job)
        assert record["direct"]
        assert record["algorithm"] != "delegate"


def test_registered_needs_a_backend_that_allocates():
    job = CollectivesJob(ops=("all_reduce",), **TINY, ours="gloo", registered=True)
    with pytest.raises(BenchError, match="--registered.*run without"):
        list(launch.run(job))


def test_a_failing_rank_shows_its_traceback():
    job = CollectivesJob(ops=("all_reduce",), **TINY, ours="nonesuch")
    with pytest.raises(launch.WorkerError) as failure:
        list(launch.run(job))
    assert "rank 0 failed" in str(failure.value)
    assert "Traceback" in str(failure.value)
    assert "nonesuch" in str(failure.value)


# Runs until it is stopped. Its ranks are its own forks, which import nothing.
ENDLESS = """
import os, runpy, subprocess, sys
import torch.distributed
from deepytorch_core.bench import launch
from deepytorch_core.bench.job import CollectivesJob


class Fork(subprocess.Popen):
    def __init__(self, words, log, env):
        self.words, self.log, self.its = words, log, env
        super().__init__(words)

    def _execute_child(self, *_):
        self.pid, self._child_created = os.fork(), True
        if self.pid:
            return
        try:
            os.setsid()
            output = os.open(self.log, os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.closerange(3, 1024)
            os.environ.clear()
            os.environ.update(self.its)
            sys.argv = self.words
            runpy.run_module(self.words[0], run_name="__main__", alter_sys=True)
        finally:
            os._exit(1)


launch._program = lambda command, log, env, *_: Fork(command[2:], log, env)
sizes = tuple(range(64, 1 << 20, 64))
kinds = {"ops": ("all_reduce",), "sizes": sizes, "dtypes": ("float32",)}
job = CollectivesJob(**kinds, world_size=2, ours="gloo")
for record in launch.run(job):
    print(record["bytes"], flush=True)
"""


@pytest.fixture
def endless():
    """A benchmark under way: its process and the process ids of its ranks."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "64"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        yield process, [int(pid) for pid in children.split()]
    finally:
        process.kill()
        process.communicate()


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def all_end(ranks):
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(is_alive(pid) for pid in ranks)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.extended),
        pytest.param(signal.SIGTERM, marks=pytest.mark.extended),
        signal.SIGKILL,
    ],
)
def test_nothing_is_left_when_it_is_stopped(endless, number):
    process, ranks = endless
    assert len(ranks) == 2
    process.send_signal(number)
    process.wait(timeout=30)
    assert all_end(ranks)


def test_a_killed_rank_is_named(endless):
    process, ranks = endless
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was killed by signal 9" in errors
    assert all_end(ranks)
