"""Answers about Horovod's build, given for what carries the collectives here."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_built() -> bool:
    """False: the launcher may be mpirun, the collectives never use MPI."""
    return False


def mpi_enabled() -> bool:
    """False, as `mpi_built`."""
    return False


def mpi_threads_supported() -> bool:
    """False, as `mpi_built`."""
    return False


def gloo_built() -> bool:
    """Whether torch has gloo, which carries what is not native on CPUs."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """The same as `gloo_built`."""
    return gloo_built()


def nccl_built() -> int:
    """NCCL's version as one number (2.27.5 is 22705), 0 where torch has none."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None
