"""Memory of GPUs that the ranks of a node share: see `deepytorch_core.c10d.device_memory`."""

from deepytorch_core.c10d.device_memory import mem_pool, usage

__all__ = ["mem_pool", "usage"]
