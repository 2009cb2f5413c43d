"""The rows of `bench collectives`: what is measured one after the other, and their records."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import bandwidth, timing
from deepytorch_core.bench.job import CollectivesJob
from deepytorch_core.bench.ops import (
    OPERATIONS,
    Allocate,
    Buffers,
    Collective,
    bytes_of,
    make_buffers,
    share_of,
)
from deepytorch_core.metering import counts


@dataclass(frozen=True)
class Row:
    """One operation of one size: `share` elements of `dtype` a rank, `num_bytes` as nccl-tests."""

    op: Collective
    num_bytes: int
    share: int
    dtype: str
    world_size: int

    @property
    def moves(self) -> bool:
        return self.op.name != "barrier"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def buffers(self, allocate: Allocate) -> Buffers:
        return make_buffers(self.op, self.share, self.torch_dtype, self.world_size, allocate)


@dataclass(frozen=True)
class RowMeasurement:
    """The ranks' findings about a row; pairs are (ours, baseline).

    `ways` are the algorithm of ours and the way of a baseline that has several ("" otherwise);
    `calls_per_graph` is None without graphs, `cpu_us` (microseconds a call) where it was not
    measured, `compute_us` where nothing was computed beside.
    """

    comparison: timing.TimeComparison
    wrong: tuple[int, int]
    ways: tuple[str, str]
    calls_per_graph: int | None = None
    cpu_us: tuple[float, float] | None = None
    compute_us: float | None = None


def cases(job: CollectivesJob) -> Iterator[Row]:
    """The rows of a job, in order."""
    for name in job.ops:
        op = OPERATIONS[name]
        # A barrier has neither size nor type, so it is one row.
        for dtype_name in job.dtypes if name != "barrier" else job.dtypes[:1]:
            dtype: torch.dtype = getattr(torch, dtype_name)
            for asked in job.sizes if name != "barrier" else (0,):
                num_bytes = asked * (job.world_size if job.per_rank and op.split else 1)
                share = share_of(op, num_bytes, dtype, job.world_size)
                exact = bytes_of(op, share, dtype, job.world_size) if name != "barrier" else 0
                yield Row(op, exact, share, dtype_name, job.world_size)


def row_of(job: CollectivesJob, row: Row, measured: RowMeasurement) -> Record:
    """The fields `COLLECTIVE_FIELDS` of `record` that the ranks know."""
    comparison = measured.comparison
    time_us = comparison.time_us
    busbw = bandwidth.busbw_gbps(row.op.name, row.num_bytes, time_us, row.world_size)
    cpu_us = None if measured.cpu_us is None else [round(value, 3) for value in measured.cpu_us]
    return {
        "op": row.op.name,
        "bytes": row.num_bytes,
        "bytes_per_rank": row.share * row.torch_dtype.itemsize if row.moves else 0,
        "per_rank": job.per_rank,
        "dtype": row.dtype,
        "world_size": row.world_size,
        "device": job.device,
        "registered": job.registered,
        "direct": job.direct,
        "cuda_graph": job.cuda_graph,
        "calls_per_graph": measured.calls_per_graph,
        "compute_us": measured.compute_us and round(measured.compute_us, 3),
        "algorithm": measured.ways[timing.OURS],
        "tuned": [_short(plan) for plan in counts.plans() if _serves(plan, job, row)],
        "time_us": round(time_us, 3),
        "cpu_us": cpu_us and cpu_us[timing.OURS],
        "baseline": job.baseline,
        "baseline_algorithm": measured.ways[timing.BASELINE],
        "baseline_time_us": round(comparison.baseline_time_us, 3),
        "baseline_cpu_us": cpu_us and cpu_us[timing.BASELINE],
        "speedup": round(comparison.speedup, 3),
        "speedup_spread": [round(value, 3) for value in comparison.spread],
        "num_blocks": comparison.num_blocks,
        "algbw_gbps": round(bandwidth.algbw_gbps(row.num_bytes, time_us), 4),
        "busbw_gbps": round(busbw, 4),
        "wrong": measured.wrong[timing.OURS],
        "baseline_wrong": measured.wrong[timing.BASELINE],
        "emulated": None,  # the launcher knows more
    }


def _serves(plan: counts.Counted, job: CollectivesJob, row: Row) -> bool:
    return (
        counts.serves(plan, row.op.name, row.share * row.torch_dtype.itemsize)
        and plan["ranks"] == row.world_size
        and bool(plan["device"]) == (job.device == "cuda")
    )


def _short(plan: counts.Counted) -> Record:
    """Return what a record keeps of a row of `_core.plans()`."""
    kept = ("device", "source", "measured_bytes", "algorithm", "delegated")
    of_candidate = ("algorithm", "chunk_bytes", "channels", "threads", "delegated", "median_us")
    candidates = [
        {name: candidate[name] for name in of_candidate} for candidate in plan["candidates"]
    ]
    return {**{name: plan[name] for name in kept}, "candidates": candidates}
