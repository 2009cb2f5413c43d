"""How many cores a rank has for itself on a node whose ranks may share them."""

from __future__ import annotations

import os

from deepytorch_core.base import config


def of_rank(usable: int) -> float:
    """Return a rank's share of `usable` cores: all if it alone is bound to them, else its part."""
    return float(usable) if _is_bound(usable) else usable / config.local_world_size()


def _is_bound(usable: int) -> bool:
    """Whether this process has fewer cores than the one that has started it.

    The process that starts those of srun is outside of the job. So there the question is whether
    the job's cores are enough to give each rank here as many as this one has.
    """
    if (of_job := config.slurm_cpus_here()) > 0:
        return usable * config.local_world_size() <= of_job
    try:
        return len(os.sched_getaffinity(0)) < len(os.sched_getaffinity(os.getppid()))
    except OSError:
        return False
