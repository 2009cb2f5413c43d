"""Tests of what srun tells a process; other launchers' words are in test_horovod_scripts.py."""

from __future__ import annotations

import os

import pytest

from deepytorch_core.base import launchers


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [
        ("4", "0", 4),
        ("4(x2),3", "1", 4),
        ("4(x2),3", "2", 3),
        ("4(x2),3", "3", 0),  # no such node
        ("4(x2),3", "", 0),
        ("", "0", 0),
        ("four", "0", 0),
        ("4(x2", "0", 0),
    ],
)
def test_tasks_on_this_node(tasks: str, node: str, expected: int) -> None:
    environ = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert launchers.slurm_tasks_here(environ) == expected


def test_outside_of_a_step_of_slurm_nothing_is_known() -> None:
    assert launchers.slurm_tasks({}) == launchers.slurm_tasks_here({}) == 0
    batch = {"SLURM_CPUS_ON_NODE": "64"}  # a script of sbatch's, which nobody started with others
    assert launchers.slurm_cpus_here(batch) == 0
    step = {**batch, "SLURM_STEP_NUM_TASKS": "8"}
    assert (launchers.slurm_tasks(step), launchers.slurm_cpus_here(step)) == (8, 64)


def test_a_launchers_word_comes_before_sruns(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepytorch_core.base import config

    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    assert config.local_world_size() == 1
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "8")
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert config.local_world_size() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert config.local_world_size() == 2


def test_cores_of_a_rank_are_its_own_or_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepytorch_core.base import cpu_affinity

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert cpu_affinity.of_rank(6) == 6.0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpu_affinity.of_rank(6) == 1.5
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64 if process else 6)))
    assert cpu_affinity.of_rank(6) == 6.0
