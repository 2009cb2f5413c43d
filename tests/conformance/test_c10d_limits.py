"""The cost of groups: memory of many, what a thousand leave behind, CPU time of idle ones."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.bench.groups import memory_bytes
from deepytorch_core.testing import rank_store, spawn_ranks
from deepytorch_core.testing.leaks import Holdings, holdings, num_mappings

BACKEND = "deepytorch"
MIB = 1 << 20

NUM_GROUPS = 64
# Beyond the memory of one group.
MOST_FOR_GROUPS = 64 * MIB

NUM_CYCLES = 1000
WARM_UP_CYCLES = 100
# Bytes that one cycle may leave: less than any buffer or stack. PyTorch itself keeps about 1 KB.
MOST_PER_CYCLE = 4096

IDLE_S = 2.0
MOST_IDLE_CPU_S = 0.010


def sums_of_differing_chunks(rank: int, world_size: int) -> None:
    """Rank 1 alone has a chunk size of its own, as a wrapper may set it."""
    import os

    from deepytorch_core.c10d import backend

    os.environ.update(DEEPYTORCH_CHUNK_BYTES=str((rank + 1) << 16))  # noqa: TID251
    backend.register()
    dist.init_process_group(BACKEND, store=rank_store("g"), rank=rank, world_size=world_size)
    for count in (1, 70_001, 1_000_003):
        value = torch.arange(count, dtype=torch.float32) % 97 + rank
        dist.all_reduce(value)
        assert torch.equal(value, 2 * (torch.arange(count, dtype=torch.float32) % 97) + 1), count


def test_rank_0s_chunk_size_counts() -> None:
    spawn_ranks(sums_of_differing_chunks, 2, fresh=True, timeout_s=30)


def summed(
    group: dist.ProcessGroup | None, tensor: torch.Tensor, *, asynchronous: bool = False
) -> None:
    tensor.fill_(1.0)
    work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
    if work is not None:
        work.wait()
    assert tensor[-1].item() == dist.get_world_size(group)


def many_groups(rank: int, world_size: int) -> int:
    # One tensor for all: large buffers made in between would show in the allocator's gaps.
    tensor = torch.empty(MIB // 4)
    groups = [dist.new_group()]
    summed(groups[0], tensor)
    dist.barrier()
    before = memory_bytes()
    dist.barrier()
    for _ in range(NUM_GROUPS):
        groups.append(dist.new_group())
        summed(groups[-1], tensor)
    dist.barrier()
    grown = memory_bytes() - before
    dist.barrier()
    for group in groups:
        summed(group, tensor)
    return grown


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory_of_many_groups(world_size: int) -> None:
    for grown in spawn_ranks(many_groups, world_size, backend=BACKEND):
        assert grown <= MOST_FOR_GROUPS


SETTLING_S = 2.0


def cycle(rank: int, world_size: int, number: int) -> None:
    store = rank_store(f"cycle{number}")
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    summed(None, torch.empty(1000), asynchronous=number % 2 == 0)
    dist.destroy_process_group()


def cycles(rank: int, world_size: int, num_cycles: int) -> tuple[Holdings, Holdings, int, int]:
    from deepytorch_core.c10d import backend

    backend.register()
    for number in range(WARM_UP_CYCLES):
        cycle(rank, world_size, number)
    time.sleep(0.2)  # for the same reason as below
    before, mappings, memory = holdings(), num_mappings(), memory_bytes()
    for number in range(WARM_UP_CYCLES, num_cycles):
        cycle(rank, world_size, number)
    # A thread has been joined a moment before the system has taken it off its list.
    deadline = time.monotonic() + SETTLING_S
    while (after := holdings()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return before, after, num_mappings() - mappings, memory_bytes() - memory


def test_a_thousand_cycles_leave_nothing_behind() -> None:
    results = spawn_ranks(cycles, 2, NUM_CYCLES, fresh=True, timeout_s=110)
    for before, after, more_mappings, more_bytes in results:
        assert after == before
        assert more_mappings < 20  # the allocator's own come and go
        assert more_bytes < (NUM_CYCLES - WARM_UP_CYCLES) * MOST_PER_CYCLE


def idle(rank: int, world_size: int) -> float:
    groups = [dist.new_group() for _ in range(8)]
    for group in groups:
        summed(group, torch.empty(1000), asynchronous=True)  # starts the group's progress thread
    dist.barrier()
    before = time.process_time()  # of all threads
    time.sleep(IDLE_S)
    return time.process_time() - before


def test_idle_groups_use_no_cpu_time() -> None:
    for used_s in spawn_ranks(idle, 2, backend=BACKEND):
        assert used_s < MOST_IDLE_CPU_S
