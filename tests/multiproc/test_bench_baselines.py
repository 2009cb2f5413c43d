"""The optional rivals: they run where their packages are, and say what to install where not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from deepytorch_core.bench import launch
from deepytorch_core.bench.job import OPERATIONS, BenchError, CollectivesJob

# With a token where DeepSpeed's own jobs, which leave theirs, have a port.
BUFFERS = f"deepspeed_allreduce_buffer_*_127.0.0.1_{'[0-9a-f]' * 16}_*"
TINY = {"sizes": (64, 4096), "world_size": 2, "iterations": 1, "budget_s": 0.01}


def is_installed(*modules):
    return all(importlib.util.find_spec(module) is not None for module in modules)


def mpi_is_installed():
    from importlib import metadata

    installed = {distribution.name for distribution in metadata.distributions()}
    return {"impi-rt", "mpi4py"} <= installed


def run_or_refuse(job, installed, message):
    """The records, or [] once the refusal was checked."""
    if installed:
        return list(launch.run(job))
    with pytest.raises(BenchError, match=message):
        list(launch.run(job))
    return []


def check(records, job):
    for record in records:
        assert record["baseline"] == job.baseline
        assert record["wrong"] == 0
        assert record["baseline_wrong"] == 0
        assert record["baseline_time_us"] > 0
        assert record["baseline_settings"]


def test_mpi():
    job = CollectivesJob(
        ops=OPERATIONS, dtypes=("float32", "int64"), **TINY, baseline="mpi", ours="gloo"
    )
    records = run_or_refuse(job, mpi_is_installed(), "pip install impi-rt mpi4py")
    check(records, job)
    for record in records:
        assert record["baseline_settings"]["I_MPI_FABRICS"] == "shm"
        assert record["versions"]["impi-rt"]


def test_mpi_with_more_ranks_than_cores_and_our_own_arm():
    changes = {"world_size": 3, "sizes": (1000,)}
    job = CollectivesJob(
        ops=("all_reduce", "all_to_all"), dtypes=("float32",), baseline="mpi", **TINY | changes
    )
    check(run_or_refuse(job, mpi_is_installed(), "pip install impi-rt mpi4py"), job)


def test_a_failure_under_mpiexec_shows_the_ranks_output():
    job = CollectivesJob(
        ops=("all_reduce",), dtypes=("float32",), **TINY, baseline="mpi", ours="nonesuch"
    )
    error = launch.WorkerError if mpi_is_installed() else BenchError
    with pytest.raises(error, match="nonesuch" if mpi_is_installed() else "pip install"):
        list(launch.run(job))


@pytest.mark.extended
@pytest.mark.timeout(600)  # where it is installed it may have to be compiled
def test_deepspeed_shm():
    before = set(Path("/dev/shm").glob(BUFFERS))
    job = CollectivesJob(
        ops=("all_reduce",),
        **TINY | {"sizes": (64, 4100, 4 << 20)},
        dtypes=("float32",),
        baseline="deepspeed-shm",
        ours="gloo",
    )
    records = run_or_refuse(job, is_installed("deepspeed"), "pip install deepspeed")
    check(records, job)
    for record in records:
        assert record["versions"]["deepspeed"]
    assert set(Path("/dev/shm").glob(BUFFERS)) <= before
