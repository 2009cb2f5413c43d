"""`bench groups`: what many process groups cost in time and memory, ours and gloo's in turns."""

import gc
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from deepytorch_core.base.provenance import Record, provenance
from deepytorch_core.bench.job import BenchError

ARMS = ("deepytorch", "gloo")


def run(count: int, world_size: int, num_bytes: int = 1 << 20, rounds: int = 3) -> Record:
    """Makes `count` groups of `world_size` ranks, `rounds` times with each backend in turns.

    Each group does one all_reduce of `num_bytes` bytes as soon as it is made. Times are the
    slowest rank's, medians over the rounds. Raises BenchError for numbers that make no sense and
    RankError when a rank fails.
    """
    if count < 1 or world_size < 2:
        raise BenchError(
            f"--count {count} --world-size {world_size}: needs at least one group of two ranks"
        )
    from deepytorch_core.c10d import adapter
    from deepytorch_core.testing import spawn_ranks

    adapter.load()  # compiled once here, not by every rank
    ranks = spawn_ranks(
        _measure, world_size, count, num_bytes, rounds, backend="gloo", timeout_s=300, fresh=True
    )
    found = {
        arm: {
            name: statistics.median(
                max(rank[arm][index][name] for rank in ranks) for index in range(rounds)
            )
            for name in ranks[0][arm][0]
        }
        for arm in ARMS
    }
    ours, gloo = (found[arm] for arm in ARMS)
    return {
        "bench": "groups",
        "count": count,
        "world_size": world_size,
        "bytes": num_bytes,
        "first_group_s": round(ours["first_s"], 4),
        "other_groups_s": round(ours["others_s"], 4),
        "other_groups_mib": round(ours["others_mib"], 2),
        "baseline": ARMS[1],
        "baseline_first_group_s": round(gloo["first_s"], 4),
        "baseline_other_groups_s": round(gloo["others_s"], 4),
        "baseline_other_groups_mib": round(gloo["others_mib"], 2),
        **provenance(),
    }


def memory_bytes() -> int:
    """Return what this process has written to: its own memory and its share of what several share.

    It leaves out the pages of files (programs, libraries), which come and go with other processes.
    """
    found = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
            found += int(line.split()[1]) * 1024
    if not found:
        raise BenchError("memory is measured as Linux kernels from 5.4 on tell it")
    return found


def _measure(
    rank: int, world_size: int, count: int, num_bytes: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    from deepytorch_core.c10d import backend

    backend.register()
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    # One tensor for all: large buffers made in between would show in the allocator's gaps.
    tensor = torch.zeros(max(1, num_bytes // 4))
    for arm in ARMS:
        dist.destroy_process_group(_used_group(arm, tensor))  # threads and libraries are loaded
    for _ in range(rounds):
        for arm in ARMS:
            found[arm].append(_round(arm, count, tensor))
    return found


def _round(arm: str, count: int, tensor: torch.Tensor) -> dict[str, float]:
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    groups = [_used_group(arm, tensor)]
    first_s = time.perf_counter() - start
    before = memory_bytes()
    dist.barrier()
    start = time.perf_counter()
    groups += [_used_group(arm, tensor) for _ in range(count)]
    others_s = time.perf_counter() - start
    dist.barrier()
    others_mib = (memory_bytes() - before) / 2**20
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    return {"first_s": first_s, "others_s": others_s, "others_mib": others_mib}


def _used_group(arm: str, tensor: torch.Tensor) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend=arm, timeout=timedelta(seconds=60))
    dist.all_reduce(tensor, group=group)
    return group


def lines(record: Record) -> Iterator[str]:
    """The record in words."""
    yield (
        f"{record['count']} groups of {record['world_size']} ranks, each used once "
        f"(all_reduce of {record['bytes']} bytes), beyond a first one:"
    )
    for name, prefix in zip(ARMS, ("", "baseline_"), strict=True):
        yield (
            f"  {name:<10}  {record[prefix + 'other_groups_s']:8.3f} s  "
            f"{record[prefix + 'other_groups_mib']:8.1f} MiB per process  "
            f"(the first: {record[prefix + 'first_group_s']:.3f} s)"
        )
