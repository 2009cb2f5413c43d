"""What every rank does: random operations until the time is up, or cycles of groups."""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepytorch_core.testing.leaks import holdings, left_over, num_mappings
from deepytorch_core.testing.soak.operations import Performance, Step, draw
from deepytorch_core.testing.worker import rank_store

_MOST_UNDER_WAY = 6
_ASK_EVERY = 50  # operations between two looks at the clock, together
_NUM_GROUPS = 6
_PARALLEL = 2  # groups of a cycle
_LOG2_IN_A_CYCLE = 11  # elements at most: it is not about these


@dataclass
class Counts:
    """What one rank tells of a round, by kind of operation.

    Attributes:
        participations: what it took part in, also in groups of itself alone.
        collectives: of those the ones of two or more ranks whose group it is the first member of,
            so that over all ranks each counts once.
    """

    participations: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)

    def add(self, step: Step, rank: int) -> None:
        self.participations[step.op] += 1
        if len(step.members) > 1 and rank == step.members[0]:
            self.collectives[step.op] += 1

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.participations + other.participations, self.collectives + other.collectives
        )


def operations(rank: int, world_size: int, seed: int, seconds: float) -> Counts:
    """Random operations for `seconds`, and how many there were.

    Raises AssertionError for a wrong result, naming the operation and the seed.
    """
    import torch.distributed as dist

    members = _groups(world_size, seed)
    groups = [dist.new_group(list(ranks)) for ranks in members]
    under_way: deque[Performance] = deque()
    done = Counts()
    deadline = time.monotonic() + seconds
    number = 0
    while number % _ASK_EVERY != 0 or not _all_over(under_way, rank, deadline):
        step = draw(seed, number, members)
        number += 1
        if rank not in step.members:
            continue
        performance = Performance(step, rank, groups[step.group])
        if step.op == "sparse":  # see there
            _finish(under_way, 0)
        performance.start()
        done.add(step, rank)
        if step.asynchronous:
            under_way.append(performance)
            _finish(under_way, _MOST_UNDER_WAY)
    return done


def _all_over(under_way: deque[Performance], rank: int, deadline: float) -> bool:
    """Whether the time is up by rank 0's clock; everything under way is finished first."""
    import torch
    import torch.distributed as dist

    _finish(under_way, 0)
    over = torch.tensor(int(rank == 0 and time.monotonic() > deadline))
    dist.all_reduce(over)
    return bool(over.item())


def _finish(under_way: deque[Performance], at_most: int) -> None:
    while len(under_way) > at_most:
        under_way.popleft().finish()


def _groups(world_size: int, seed: int) -> list[tuple[int, ...]]:
    """All ranks, and some of them, the same choice on every rank."""
    dice = random.Random(seed)
    found = [tuple(range(world_size))]
    while len(found) < _NUM_GROUPS:
        size = dice.randrange(1, world_size + 1)
        found.append(tuple(sorted(dice.sample(range(world_size), size))))
    return found


def cycles(rank: int, world_size: int, count: int) -> dict[str, Any]:
    """`count` times: groups are made, used and destroyed. What the later nine tenths left behind.

    Returns descriptors, threads and the like that are left, how many more mappings there are, and
    by how many bytes a cycle what is resident has grown.
    """
    from deepytorch_core import backend

    backend.register()
    warm_up = max(1, count // 10)
    before, mappings, resident = holdings(), num_mappings(), _resident_bytes()
    for number in range(count):
        if number == warm_up:
            before, mappings, resident = holdings(), num_mappings(), _resident_bytes()
        _cycle(rank, world_size, number)
    return {
        "left": left_over(before),
        "mappings": num_mappings() - mappings,
        "bytes_per_cycle": (_resident_bytes() - resident) / max(1, count - warm_up),
    }


def _cycle(rank: int, world_size: int, number: int) -> None:
    import torch.distributed as dist

    store = rank_store(f"cycle{number}")
    dist.init_process_group("deepytorch", store=store, rank=rank, world_size=world_size)
    members = [tuple(range(world_size))] * _PARALLEL
    groups = [dist.new_group(list(ranks)) for ranks in members]
    for index in range(2 * _PARALLEL):
        performance = Performance(
            draw(number, index, members, most_log2=_LOG2_IN_A_CYCLE),
            rank,
            groups[index % _PARALLEL],
        )
        performance.start()
        performance.finish()
    dist.destroy_process_group()


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory is no leak, wherever the allocator keeps it
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no line RssAnon")
