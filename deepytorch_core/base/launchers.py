"""Pure functions that read what the launcher of a job told a process in its environment.

srun tells every process how many there are, but neither where they meet nor which one of a job it
is. So it is no launcher here, but it does tell how many share a node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# launcher -> its variables for the fields of Launched, in their order; "" where it has none.
_VARIABLES = {
    "torchrun": (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "TORCHELASTIC_RUN_ID",
    ),
    "horovodrun": (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
    ),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
        "PMIX_NAMESPACE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", ""),
}


@dataclass(frozen=True)
class Launched:
    """The facts that the launcher of a job told this process.

    `node` is the node's number or name where the launcher gives one. `job` is a name that all local
    processes of the job share and others don't.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: str | None
    job: str | None


def launched(environ: Mapping[str, str]) -> Launched | None:
    """Return the facts of torchrun, horovodrun, mpirun or mpiexec, the first that told any.

    None for a process that none of them started. Raises ValueError naming the variable that is no
    number.
    """

    def whole(name: str) -> int | None:
        text = environ.get(name, "")
        if not text:
            return None
        if not text.isdecimal():
            raise ValueError(f"{name}={text!r}: expected a whole number")
        return int(text)

    for launcher, names in _VARIABLES.items():
        rank, size = whole(names[0]), whole(names[1])
        if rank is not None and size is not None:
            return Launched(
                launcher,
                rank,
                size,
                local_rank=whole(names[2]),
                local_size=whole(names[3]),
                node=environ.get(names[4]) or None,
                job=environ.get(names[5]) or None,
            )
    return None


def number(environ: Mapping[str, str], name: str, default: int) -> int:
    """A number of torchrun's, or what another launcher calls it."""
    column = _VARIABLES["torchrun"].index(name)
    for names in _VARIABLES.values():
        value = environ.get(names[column], "")
        if value.isdecimal():
            return int(value)
    return default


def slurm_tasks(environ: Mapping[str, str]) -> int:
    """How many processes srun started with this one; 0 outside of a step of Slurm's."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    return int(tasks) if tasks.isdecimal() else 0


def slurm_cpus_here(environ: Mapping[str, str]) -> int:
    """Return the number of this node's processors that srun gave to all tasks; 0 if not said."""
    cpus = environ.get("SLURM_CPUS_ON_NODE", "") if slurm_tasks(environ) else ""
    return int(cpus) if cpus.isdecimal() else 0


def slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """How many of them are on this node; 0 where srun does not say it."""
    tasks: list[int] = []
    for text in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", text)  # "8(x2)": on each of two nodes
        if found is None:
            return 0
        tasks += [int(found[1])] * int(found[2] or 1)
    node = environ.get("SLURM_NODEID", "")
    return tasks[int(node)] if node.isdecimal() and int(node) < len(tasks) else 0
