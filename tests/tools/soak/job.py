"""Runs every rank: random operations until the time is up, or cycles of groups."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepytorch_core.testing.leaks import holdings, left_over, num_mappings
from deepytorch_core.testing.tensors import rank_gpu
from deepytorch_core.testing.worker import rank_store
from soak.operations import Performance, Step, draw, has_gloo
from soak.watch import Held, Watch, resident_bytes

if TYPE_CHECKING:
    import torch

_MOST_UNDER_WAY = 6
_ASK_EVERY = 50  # operations between two looks at the clock, together
_GLOO_EVERY = 8  # operations, of which one is carried out by gloo as well
_NUM_GROUPS = 6
_PARALLEL = 2  # groups of a cycle
_LOG2_IN_A_CYCLE = 11  # elements at most: it is not about these


@dataclass
class Counts:
    """The counts that one rank tells of a round, by kind of operation.

    Attributes:
        participations: operations that it took part in, also in groups of itself alone.
        collectives: those of two or more ranks whose group it is the first member of, so that over
            all ranks each counts once.
        by_gloo: collectives that gloo carried out as well, with the same result.
    """

    participations: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    by_gloo: int = 0

    def add(self, step: Step, rank: int) -> None:
        self.participations[step.op] += 1
        if len(step.members) > 1 and rank == step.members[0]:
            self.collectives[step.op] += 1

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.participations + other.participations,
            self.collectives + other.collectives,
            self.by_gloo + other.by_gloo,
        )


def operations(
    rank: int, world_size: int, seed: int, seconds: float, device: str = "cpu"
) -> tuple[Counts, Held]:
    """Random operations for `seconds`: how many there were, and whether they went on as they began.

    Raises AssertionError for a wrong result, naming the operation and the seed.
    """
    return _operations(rank, world_size, seed, seconds, device=device)


def operations_beside_gloo(
    rank: int, world_size: int, seed: int, seconds: float
) -> tuple[Counts, Held]:
    """As `operations` on CPUs, where stock gloo carries out one of so many as well."""
    return _operations(rank, world_size, seed, seconds, beside_gloo=True)


def _operations(
    rank: int,
    world_size: int,
    seed: int,
    seconds: float,
    *,
    device: str = "cpu",
    beside_gloo: bool = False,
) -> tuple[Counts, Held]:
    import torch.distributed as dist

    place = _place(rank, device)
    members = _groups(world_size, seed)
    groups = [dist.new_group(list(ranks)) for ranks in members]
    stock = [_by_gloo(ranks) for ranks in members] if beside_gloo else []
    under_way: deque[Performance] = deque()
    done = Counts()
    watch = Watch(seconds, place)
    deadline = time.monotonic() + seconds
    number = 0
    while number % _ASK_EVERY != 0 or not _all_over(under_way, rank, deadline):
        if number % _ASK_EVERY == 0:
            watch.look(number)
        step = draw(seed, number, members, device=device)
        number += 1
        if rank not in step.members:
            continue
        performance = Performance(step, rank, groups[step.group], place)
        if step.op == "sparse":  # see there
            _finish(under_way, 0)
        performance.start()
        done.add(step, rank)
        if stock and number % _GLOO_EVERY == 0 and has_gloo(step):
            same = Performance(step, rank, stock[step.group], place, plain=True)
            same.start()
            same.finish()
            done.by_gloo += rank == step.members[0] and len(step.members) > 1
        if step.asynchronous:
            under_way.append(performance)
            _finish(under_way, _MOST_UNDER_WAY)
    watch.look(number)
    return done, watch.held()


def _place(rank: int, device: str) -> torch.device:
    import torch

    return torch.device("cpu") if device == "cpu" else rank_gpu(rank)


def _by_gloo(ranks: tuple[int, ...]) -> Any:
    """A group of torch's own gloo."""
    import torch
    import torch.distributed as dist

    from deepytorch_core.c10d import patches as c10d_patches

    with c10d_patches.as_asked():
        made = dist.new_group(list(ranks), backend="gloo")
    if isinstance(made, dist.ProcessGroup):
        serving = made._get_backend(torch.device("cpu"))
        assert isinstance(serving, dist.ProcessGroupGloo), serving
    return made


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


def cycles(rank: int, world_size: int, count: int, device: str = "cpu") -> dict[str, Any]:
    """`count` times: groups are made, used and destroyed. What the later nine tenths left behind.

    Returns the descriptors, threads and the like that are left, and how many more mappings there
    are. The last value is by how many bytes a cycle the resident memory has grown.
    """
    from deepytorch_core.c10d import backend

    backend.register()
    place = _place(rank, device)
    warm_up = max(1, count // 10)
    before, mappings, resident = holdings(), num_mappings(), resident_bytes()
    for number in range(count):
        if number == warm_up:
            before, mappings, resident = holdings(), num_mappings(), resident_bytes()
        _cycle(rank, world_size, number, place)
    return {
        "left": left_over(before),
        "mappings": num_mappings() - mappings,
        "bytes_per_cycle": (resident_bytes() - resident) / max(1, count - warm_up),
    }


def _cycle(rank: int, world_size: int, number: int, place: torch.device) -> None:
    import torch.distributed as dist

    store = rank_store(f"cycle{number}")
    dist.init_process_group("deepytorch", store=store, rank=rank, world_size=world_size)
    members = [tuple(range(world_size))] * _PARALLEL
    groups = [dist.new_group(list(ranks)) for ranks in members]
    for index in range(2 * _PARALLEL):
        performance = Performance(
            draw(number, index, members, most_log2=_LOG2_IN_A_CYCLE, device=place.type),
            rank,
            groups[index % _PARALLEL],
            place,
        )
        performance.start()
        performance.finish()
    dist.destroy_process_group()
