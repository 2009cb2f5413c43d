"""Memory that the ranks of a node share: see `deepytorch_core.c10d.registered`."""

from deepytorch_core.c10d.registered import empty, is_registered, place_ddp_buckets, trim

__all__ = ["empty", "is_registered", "trim", "place_ddp_buckets"]
