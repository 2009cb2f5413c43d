"""Sends and receives of backend "deepytorch" do what gloo's do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from deepytorch_core.testing import rank_store, spawn_ranks

BACKEND = "deepytorch"
Group = dist.ProcessGroup
Case = Callable[[Group, int, int], Any]

# A killed rank is noticed at once; the limit only tells that from waiting for a timeout.
NOTICED_WITHIN_S = 5.0

LARGE = 700_001  # past every ring and slot of the mailboxes
MANY = [(100, 20_000), (3000, 20)]  # messages at a time, and their sizes: past every ring, too

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.complex64]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(0, 100, shape).to(dtype)


def error_of(call: Callable[[], object]) -> str:
    """The text of the DistBackendError that `call` ends with."""
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value)


def blocking(group: Group, rank: int, size: int) -> Any:
    """Around the ring, rank 0 first: every size and dtype."""
    received = []
    for dtype in DTYPES:
        for count in (0, 1, 1023, 70001, LARGE):
            mine, theirs = values(count, dtype=dtype), torch.zeros(count, dtype=dtype)
            if rank == 0:
                dist.send(mine, group=group, group_dst=1)
                dist.recv(theirs, group=group, group_src=size - 1)
            else:
                dist.recv(theirs, group=group, group_src=rank - 1)
                dist.send(mine, group=group, group_dst=(rank + 1) % size)
            received.append(theirs)
    return received


def tags_overtake(group: Group, rank: int, size: int) -> Any:
    received = {tag: torch.zeros(1000 * tag) for tag in (1, 2, 90)}
    works = []
    if rank == 0:
        tensors = {tag: values(1000 * tag) for tag in (1, 2, 90)}
        works = [dist.isend(tensors[tag], group=group, group_dst=1, tag=tag) for tag in tensors]
    elif rank == 1:
        for tag in (90, 2, 1):
            dist.recv(received[tag], group=group, group_src=0, tag=tag)
    for work in works:
        assert work is not None
        work.wait()
    return received


def posting_order(group: Group, rank: int, size: int) -> Any:
    received = [torch.zeros(count) for count in (5, 100_000, 7, 100_000)]
    works = []
    for tensor in received:
        if rank == 0:
            works.append(dist.isend(values(tensor.numel()), group=group, group_dst=1))
        elif rank == 1:
            works.append(dist.irecv(tensor, group=group, group_src=0))
    for work in works:
        assert work is not None
        work.wait()
    return received


def any_source(group: Group, rank: int, size: int) -> Any:
    """Senders one after the other, so that it is known who is meant."""
    sources = []
    received = []
    for sender in range(1, size):
        if rank == sender:
            dist.send(values(300 * sender), group=group, group_dst=0, tag=4)
        if rank == 0:
            tensor = torch.zeros(300 * sender)
            sources.append(dist.recv(tensor, group=group, tag=4))
            received.append(tensor)
        dist.barrier(group)
    return sources, received


def any_source_asynchronously(group: Group, rank: int, size: int) -> Any:
    if rank != 0:
        dist.send(torch.tensor([rank]), group=group, group_dst=0)
        return None
    received = [torch.zeros(1, dtype=torch.int64) for _ in range(1, size)]
    works = [dist.irecv(tensor, group=group) for tensor in received]
    pairs = []
    for work, tensor in zip(works, received, strict=True):
        assert work is not None
        work.wait()
        pairs.append((work._source_rank(), tensor.item()))
    assert all(source == content for source, content in pairs)
    return sorted(pairs)


def object_lists(group: Group, rank: int, size: int) -> Any:
    objects: list[Any] = [None, None]
    if rank == 0:
        objects = [{"text": "x" * 100_000}, list(range(20))]
        dist.send_object_list(objects, group=group, group_dst=1)
    elif rank == 1:
        assert dist.recv_object_list(objects, group=group, group_src=0) == 0
    return objects


def batch_in_both_directions(group: Group, rank: int, size: int) -> Any:
    left, right = (rank - 1) % size, (rank + 1) % size
    received = [torch.zeros(LARGE), torch.zeros(9)]
    operations = []
    for tensor in received:
        mine = values(tensor.numel())
        operations += [
            dist.P2POp(dist.isend, mine, group=group, group_peer=right),
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=left),
        ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def between_collectives(group: Group, rank: int, size: int) -> Any:
    """A receive stays open over collectives; its sender sends after them."""
    received = torch.zeros(LARGE)
    total = values(5000)
    work = dist.irecv(received, group=group, group_src=1) if rank == 0 else None
    pending = dist.all_reduce(total, group=group, async_op=True)
    dist.barrier(group)
    if rank == 1:
        work = dist.isend(values(LARGE), group=group, group_dst=0)
    dist.all_reduce(total, group=group)
    assert pending is not None
    for each in (pending, work):
        if each is not None:
            each.wait()
    return received, total


def futures_and_results(group: Group, rank: int, size: int) -> Any:
    tensor = values(10) if rank == 0 else torch.zeros(10)
    if rank == 0:
        work = dist.isend(tensor, group=group, group_dst=1)
    elif rank == 1:
        work = dist.irecv(tensor, group=group, group_src=0)
    else:
        return None
    assert work is not None
    work.wait()
    assert work.is_completed()
    return tensor if rank == 1 else None


def started(*works: dist.Work | None) -> list[dist.Work]:
    return [work for work in works if work is not None]


def many_in_the_opposite_order(group: Group, rank: int, size: int) -> Any:
    received = []
    for number, count in MANY:
        works = []
        for tag in range(number):
            mine = values(count)
            works += started(dist.isend(mine, group=group, group_dst=(rank + 1) % size, tag=tag))
        for tag in reversed(range(number)):
            theirs = torch.zeros(count)
            dist.recv(theirs, group=group, group_src=(rank - 1) % size, tag=tag)
            received.append(theirs)
        for work in works:
            work.wait()
    return received


def many_that_one_behind_them_tells_of(group: Group, rank: int, size: int) -> Any:
    """All of one tag; who gets them learns their number and sizes first."""
    counts = [16_000 + 300 * i for i in range(60)]
    received = []
    if rank == 0:
        works = []
        for peer in range(1, size):
            for count in counts:
                works += started(dist.isend(values(count), group=group, group_dst=peer, tag=7))
            works += started(dist.isend(torch.tensor(counts), group=group, group_dst=peer, tag=8))
        for work in works:
            work.wait()
    else:
        sizes = torch.zeros(len(counts), dtype=torch.int64)
        dist.recv(sizes, group=group, group_src=0, tag=8)
        for count in sizes.tolist():
            tensor = torch.zeros(count)
            dist.recv(tensor, group=group, group_src=0, tag=7)
            received.append(tensor)
    return received


def many_from_any_rank(group: Group, rank: int, size: int) -> Any:
    number, count = MANY[0]
    if rank != 0:
        works = []
        for tag in range(number):
            mine = torch.full((count,), 1000.0 * rank + tag)
            works += started(dist.isend(mine, group=group, group_dst=0, tag=tag))
        for work in works:
            work.wait()
        return None
    received = []
    for tag in reversed(range(number)):
        tensors = torch.zeros(size - 1, count)
        for tensor in tensors:
            source = dist.recv(tensor, group=group, tag=tag)
            assert tensor[0] == 1000 * source + tag
        received.append(tensors.sort(dim=0).values)
    return received


def many_awaited_by_threads(group: Group, rank: int, size: int) -> Any:
    number, count = 60, 20_000
    peer = (rank + 1) % size, (rank - 1) % size
    works = []
    for tag in range(number):
        works += started(dist.isend(values(count), group=group, group_dst=peer[0], tag=tag))
    received = torch.zeros(number, count)

    def receive(tags: range) -> None:
        for tag in reversed(tags):
            dist.recv(received[tag], group=group, group_src=peer[1], tag=tag)

    with ThreadPoolExecutor() as threads:
        for each in [threads.submit(receive, range(first, number, 3)) for first in range(3)]:
            each.result()
    for work in works:
        work.wait()
    return received


def many_in_a_batch(group: Group, rank: int, size: int) -> Any:
    number, count = 40, 20_000
    received = torch.zeros(number, count)
    operations = []
    for tag in range(number):
        to, by = (rank + 1) % size, (rank - 1) % size
        operations.append(dist.P2POp(dist.isend, values(count), None, group, tag, to))
        operations.append(dist.P2POp(dist.irecv, received[~tag], None, group, ~tag + number, by))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


CASES: list[Case] = [
    blocking,
    tags_overtake,
    posting_order,
    any_source,
    any_source_asynchronously,
    object_lists,
    batch_in_both_directions,
    between_collectives,
    futures_and_results,
    many_in_the_opposite_order,
    many_that_one_behind_them_tells_of,
    many_from_any_rank,
    many_awaited_by_threads,
    many_in_a_batch,
]


def run_case(rank: int, world_size: int, name: str) -> None:
    case: Case = globals()[name]
    results = []
    gloo = dist.new_group(backend="gloo")
    dist.barrier()  # who has no part in the case would leave while others still connect to it
    for group in (dist.group.WORLD, gloo):
        torch.manual_seed(rank)
        results.append(case(group, rank, world_size))
    ours, theirs = (tree_flatten(result) for result in results)
    assert ours[1] == theirs[1]
    for mine, expected in zip(ours[0], theirs[0], strict=True):
        if isinstance(expected, torch.Tensor):
            assert torch.equal(mine, expected)
        else:
            assert mine == expected


SLOW = many_in_the_opposite_order


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        pytest.param(case, size, marks=[pytest.mark.extended] * (case is SLOW and size == 3))
        for case in CASES
        for size in (2, 3)
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_same_as_gloo(case: Case, world_size: int) -> None:
    spawn_ranks(run_case, world_size, case.__name__, backend=BACKEND)


def strided(rank: int, world_size: int) -> None:
    storage = torch.full((50, 2), -1.0)
    if rank == 0:
        dist.send(torch.arange(100.0)[::2], 1)
    else:
        dist.recv(storage[:, 0], 0)
        assert torch.equal(storage[:, 0], torch.arange(0.0, 100.0, 2))
        assert torch.equal(storage[:, 1], torch.full((50,), -1.0))


def test_strided_tensors() -> None:
    spawn_ranks(strided, 2, backend=BACKEND)


def first_of_two(rank: int, world_size: int) -> list[tuple[str, str]]:
    """The group's first operation concerns two ranks of four; the others do nothing yet."""
    from deepytorch_core import _core

    _core.reset_statistics()
    tensor = torch.zeros(10)
    if rank == 1:
        dist.send(torch.ones(10), 3)
    elif rank == 3:
        dist.recv(tensor, 1)
        assert tensor.sum() == 10
        dist.send(tensor, 0)  # and one that nobody waits for yet
    dist.barrier()
    if rank == 0:
        dist.recv(tensor, 3)
        assert tensor.sum() == 10
    return sorted((row["op"], row["algorithm"]) for row in _core.statistics() if row["calls"])


def test_the_first_operation_needs_two_ranks_only() -> None:
    counted = spawn_ranks(first_of_two, 4, backend=BACKEND)
    barrier = ("barrier", "barrier")
    assert counted == [
        [barrier, ("recv", "mailbox")],
        [barrier, ("send", "mailbox")],
        [barrier],
        [barrier, ("recv", "mailbox"), ("send", "mailbox")],
    ]


def both_send_first(rank: int, world_size: int) -> None:
    peer = 1 - rank
    dist.send(torch.full((16000,), float(rank)), peer)
    tensor = torch.zeros(16000)
    dist.recv(tensor, peer)
    assert torch.equal(tensor, torch.full((16000,), float(peer)))


def test_small_blocking_sends_do_not_wait_for_the_receiver() -> None:
    spawn_ranks(both_send_first, 2, backend=BACKEND)


def to_itself(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="source rank|destination rank|own"):
        dist.send(torch.ones(1), rank)
    with pytest.raises(ValueError, match="negative"):
        dist.isend(torch.ones(1), 1 - rank, tag=-1)
    with pytest.raises(ValueError, match="rank"):
        dist.isend(torch.ones(1), group_dst=2)
    mine, received = torch.arange(LARGE), torch.zeros(LARGE, dtype=torch.int64)
    works = [dist.isend(mine, rank), dist.irecv(received, rank)]
    for work in works:
        assert work is not None
        work.wait()
    assert torch.equal(mine, received)
    for number, count in MANY:
        many = torch.randn(number, count)
        works = [dist.isend(many[tag], rank, tag=tag) for tag in range(number)]
        for tag in reversed(range(number)):
            tensor = torch.zeros(count)
            started(dist.irecv(tensor, rank, tag=tag))[0].wait()
            assert torch.equal(tensor, many[tag])
        for work in started(*works):
            work.wait()


def test_sends_of_a_rank_to_itself() -> None:
    spawn_ranks(to_itself, 2, backend=BACKEND)


def different_sizes(rank: int, world_size: int, count: int) -> str:
    dist.barrier()
    text = ""
    if rank == 1 or count > 20_000:  # a small send has ended before anybody could see it
        text = error_of(
            lambda: (
                dist.recv(torch.ones(count + 1), 0, tag=6)
                if rank == 1
                else dist.send(torch.ones(count), 1, tag=6)
            )
        )
        for part in (f"rank 0 sent {count} x float32", f"rank 1 expected {count + 1}", "tag 6"):
            assert part in text
    else:
        dist.send(torch.ones(count), 1, tag=6)
    tensor = torch.ones(LARGE)
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    dist.all_reduce(tensor)
    return text


@pytest.mark.parametrize("count", [10, LARGE])
def test_different_sizes_name_both_sides(count: int) -> None:
    spawn_ranks(different_sizes, 2, count, backend=BACKEND)


def timed_out(rank: int, world_size: int) -> None:
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"rank 1 with tag 8.*turns deepytorch off"):
            dist.recv(torch.ones(10), 1, tag=8)
        rank_store("over").set("over", "")
    else:
        rank_store("over").wait(["over"])


def test_a_message_that_never_comes() -> None:
    spawn_ranks(timed_out, 2, backend=BACKEND)


def killed(rank: int, world_size: int) -> tuple[str, float]:
    dist.barrier()
    if rank == 2:
        works = [dist.isend(torch.ones(LARGE), peer) for peer in (0, 1)]
        assert all(work is not None for work in works)
        rank_store("time").set("of death", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    # The first may have come through.
    text = error_of(lambda: [dist.recv(torch.zeros(LARGE), 2) for _ in range(2)])
    return text, time.time() - float(rank_store("time").get("of death"))


def test_a_killed_sender_is_named() -> None:
    results = spawn_ranks(killed, 3, backend=BACKEND, expect_dead={2}, timeout_s=40)
    for text, noticed in results[:2]:
        assert text.startswith("recv #")
        assert "rank 2 (pid" in text
        assert noticed < NOTICED_WITHIN_S
