"""Bandwidth as nccl-tests defines it, one line per collective. GB/s = 1e9 B/s.

`bytes` is nccl-tests' size column. For all_reduce and broadcast it is the buffer of one rank. For
all_gather, reduce_scatter and all_to_all it is the full gathered buffer (every rank's share).

algbw = bytes / time. busbw = algbw x factor, where the factor is the part of `bytes` that the
busiest link must carry, so busbw can be compared with the link's speed at any number of ranks.
"""

from collections.abc import Callable

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "barrier": lambda n: 0.0,  # moves no data
}


def algbw_gbps(num_bytes: int, time_us: float) -> float:
    """Bytes per second of one operation, in GB/s; 0 when nothing was moved."""
    return num_bytes / (time_us * 1e-6) / 1e9 if num_bytes else 0.0


def busbw_gbps(op: str, num_bytes: int, time_us: float, world_size: int) -> float:
    """algbw scaled to the traffic of the busiest link, in GB/s.

    Raises ValueError for an operation without a formula.
    """
    if op not in BUS_FACTORS:
        raise ValueError(f"no bandwidth formula for {op!r}; known: {', '.join(BUS_FACTORS)}")
    return algbw_gbps(num_bytes, time_us) * BUS_FACTORS[op](world_size)
