"""Groups as torch programs make them: sub-groups, many at once, again, forked, out of order."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import rank_store, spawn_ranks

BACKEND = "deepytorch"


def summed(group: dist.ProcessGroup | None, value: float, count: int = 300) -> float:
    tensor = torch.full((count,), value)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, tensor[:1].expand(count))
    return tensor[0].item()


def sub_groups(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    assert serving_name(mine) == BACKEND
    assert dist.get_process_group_ranks(mine) == [rank % 2, rank % 2 + 2]
    assert summed(mine, rank) == 2 * (rank % 2) + 2
    # Roots and peers are global ranks.
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, src=rank % 2 + 2, group=mine)
    assert tensor.item() == rank % 2 + 2
    peer = (rank + 2) % 4
    received = torch.zeros(1)
    work = dist.isend(torch.tensor([float(rank)]), peer, group=mine)
    dist.recv(received, peer, group=mine)
    assert work is not None
    work.wait()
    assert received.item() == peer
    # Ranks in an order of their own, and one rank alone.
    reversed_group = dist.new_group([3, 2, 1, 0], use_local_synchronization=True)
    assert dist.get_process_group_ranks(reversed_group) == [0, 1, 2, 3]
    alone = dist.new_group([rank], use_local_synchronization=True, group_desc="alone")
    assert summed(alone, 5.0) == 5.0
    dist.barrier(group=alone)
    outsiders = dist.new_group([0, 1])
    if rank < 2:
        assert summed(outsiders, 1.0) == 2.0
    else:
        assert outsiders == dist.GroupMember.NON_GROUP_MEMBER


def test_sub_groups() -> None:
    spawn_ranks(sub_groups, 4, backend=BACKEND)


def many_in_flight(rank: int, world_size: int, meet_first: bool) -> None:
    groups = [dist.new_group() for _ in range(6)]
    for group in groups if meet_first else []:
        dist.barrier(group)
    for _ in range(5):
        tensors = [torch.full((1 + 5000 * i,), float(rank + i)) for i in range(len(groups))]
        order = list(range(len(groups)))
        # Every rank starts and awaits them in an order of its own.
        start = order[rank:] + order[:rank]
        works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in start}
        for i in reversed(start):
            works[i].wait()
            expected = float(sum(range(world_size)) + world_size * i)
            assert torch.equal(tensors[i], torch.full_like(tensors[i], expected))


@pytest.mark.parametrize("meet_first", [True, False])
def test_many_groups_in_flight(meet_first: bool) -> None:
    spawn_ranks(many_in_flight, 3, meet_first, backend=BACKEND, timeout_s=20)


def groups_in_flight(rank: int, world_size: int) -> None:
    many_in_flight(rank, world_size, meet_first=False)


def modules_in_flight(rank: int, world_size: int) -> None:
    """DDP modules with groups of their own, whose gradients come in an order of each rank's own."""
    groups = [dist.new_group() for _ in range(4)]
    torch.manual_seed(0)
    modules = [DistributedDataParallel(nn.Linear(300, 300), process_group=g) for g in groups]
    for step in range(3):
        # In the second step DDP's ranks agree on their buckets, one module after the other.
        order = modules[::-1] if rank % 2 and step != 1 else modules
        for module in order:
            module.zero_grad()
        value = torch.full((2, 300), float(rank + 1))
        sum(module(value).sum() for module in order).backward()
        for module in modules:
            expected = torch.full((300, 300), 2.0 * sum(range(1, world_size + 1)) / world_size)
            torch.testing.assert_close(module.module.weight.grad, expected)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("run", [groups_in_flight, modules_in_flight])
def test_groups_in_flight_while_plans_are_tried(
    run: Callable[[int, int], None], world_size: int, tmp_path: Path
) -> None:
    """As users have it: tuning is on, and nothing is known yet."""
    env = {"DEEPYTORCH_TUNE": "auto", "DEEPYTORCH_PROFILE": str(tmp_path / "profile.json")}
    spawn_ranks(run, world_size, backend=BACKEND, env=env, fresh=True, timeout_s=40)


def mesh(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert serving_name(grid.get_group("rows")) == BACKEND
    total = summed(grid.get_group("rows"), rank)
    assert total == (2, 4)[rank % 2]
    assert summed(grid.get_group("columns"), total) == 6


def test_device_mesh() -> None:
    spawn_ranks(mesh, 4, backend=BACKEND)


def destroyed_in_any_order(rank: int, world_size: int) -> None:
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        summed(group, 1.0)
    # Each rank in its own order, while other groups work on.
    for index in (rank, (rank + 1) % 3, (rank + 2) % 3):
        dist.destroy_process_group(groups[index])
        assert summed(None, 1.0) == world_size
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_reduce(torch.zeros(1), group=groups[0])


def test_destroyed_in_any_order() -> None:
    spawn_ranks(destroyed_in_any_order, 3, backend=BACKEND)


def destroyed_with_work_under_way(rank: int, world_size: int) -> float:
    tensor = torch.full((200_000,), 1.0)
    dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    return tensor[-1].item()


def test_destroy_waits_for_work_under_way() -> None:
    assert spawn_ranks(destroyed_with_work_under_way, 2, backend=BACKEND) == [2.0, 2.0]


def initialised_again(rank: int, world_size: int, same_store: bool) -> None:
    from deepytorch_core.c10d import backend

    backend.register()
    store = rank_store("shared")
    for attempt in range(4):
        where = store if same_store else rank_store(f"attempt{attempt}")
        where = dist.PrefixStore(f"attempt{attempt}", where) if attempt % 2 else where
        dist.init_process_group(BACKEND, store=where, rank=rank, world_size=world_size)
        assert summed(None, float(attempt)) == attempt * world_size
        group = dist.new_group()
        assert summed(group, 1.0) == world_size
        dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("same_store", [False, True])
def test_initialised_again_in_the_same_process(same_store: bool) -> None:
    spawn_ranks(initialised_again, 2, same_store)


def leaves_at_once(rank: int, world_size: int) -> None:
    """Rank 0, which keeps the store, is through before the others have begun."""
    shared = rank_store("where the store is")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        shared.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(shared.get("port")), world_size, False)
        shared.set(f"connected {rank}", "")
        time.sleep(0.3)
    shared.wait([f"connected {peer}" for peer in range(1, world_size)])
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    dist.destroy_process_group()


def test_rank_0_may_leave_a_group_that_was_never_used() -> None:
    spawn_ranks(leaves_at_once, 3)


def leaves_before_it_is_used(
    rank: int, world_size: int, pause_s: float, acts: list[str]
) -> list[str]:
    """Rank 0 destroys groups, one for each act, with which the others begin `pause_s` later."""
    dist.init_process_group(BACKEND, store=rank_store("w"), rank=rank, world_size=world_size)
    groups, done = [dist.new_group() for _ in acts], rank_store("done")
    if rank == 0:
        dist.destroy_process_group()
        done.wait([str(peer) for peer in range(1, world_size)])
        return []
    time.sleep(pause_s)

    def use(act: str, group: Any) -> str:
        try:
            if act == "all_reduce":
                dist.all_reduce(torch.ones(3), group=group)
            elif rank == 1:
                dist.send(torch.ones(3), 2, group=group)
            else:
                dist.recv(torch.zeros(3), 1, group=group)
        except RuntimeError as error:
            return str(error)
        return "done"

    with ThreadPoolExecutor() as threads:
        said = list(threads.map(use, acts, groups))
    done.set(str(rank), "")
    return said


@pytest.mark.parametrize(
    ("pause_s", "acts"), [(0.2, ["message"]), (4, ["message", "all_reduce"])], ids=["soon", "late"]
)
def test_a_rank_that_leaves_a_group_before_it_is_used(pause_s: float, acts: list[str]) -> None:
    """A moment later messages of others pass; then who would wait for it for ever is told."""
    ranks = spawn_ranks(leaves_before_it_is_used, 3, pause_s, acts, fresh=True)[1:]
    assert [len(said) for said in ranks] == [len(acts)] * 2
    if pause_s < 1:
        assert ranks == [["done"], ["done"]]
    for text in [text for said in ranks for text in said] if pause_s > 1 else []:
        assert "rank 0 has left the group (destroy_process_group, or its program's end)" in text


def by_environment(rank: int, world_size: int) -> None:
    from deepytorch_core.c10d import backend

    backend.register()
    dist.init_process_group(BACKEND)  # what torchrun has set
    assert summed(None, 1.0) == world_size
    options = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert options.name() == BACKEND


def test_initialised_by_the_environment() -> None:
    spawn_ranks(by_environment, 2, fresh=True)


def mixed_devices(rank: int, world_size: int) -> None:
    from deepytorch_core.c10d import backend

    backend.register()
    names = f"cpu:gloo,cuda:{BACKEND}"
    dist.init_process_group(names, store=rank_store("w"), rank=rank, world_size=world_size)
    assert summed(None, 1.0) == world_size


def test_for_one_device_type_only() -> None:
    spawn_ranks(mixed_devices, 2)


def sequence_numbers(rank: int, world_size: int) -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    numbers = []
    for _ in range(3):
        dist.all_reduce(torch.zeros(3))
        numbers.append(backend._get_sequence_number_for_group())
    return numbers


def test_sequence_numbers_count_up() -> None:
    first, second = spawn_ranks(sequence_numbers, 2, backend=BACKEND)
    assert first == second
    assert [later - first[0] for later in first] == [0, 1, 2]


class GpusAlone:
    """A group as `tell_devices` sees it, whose backend for GPUs is another group's for the host."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def _get_backend(self, device: torch.device) -> Any:
        return self.group._get_backend(torch.device("cpu"))


def detail_level(rank: int, world_size: int) -> float:
    """Also after messages, of which each rank has another number, as the stages of a pipeline."""
    from deepytorch_core.c10d import backend

    dist.set_debug_level(dist.DebugLevel.DETAIL)  # or torch would read it when it is imported
    backend.register()
    dist.init_process_group(BACKEND, store=rank_store("w"), rank=rank, world_size=world_size)
    sent = torch.ones(3)
    for _ in range(2):
        if rank < 2:
            dist.send(sent, 1) if rank == 0 else dist.recv(sent, 0)
    group = dist.new_group()
    backend.tell_devices(GpusAlone(group), {"cuda": BACKEND})
    return summed(None, 1.0)


def test_debug_level_detail() -> None:
    assert spawn_ranks(detail_level, 3, fresh=True) == [3.0] * 3


def in_threads(rank: int, world_size: int) -> None:
    groups = [dist.new_group() for _ in range(3)]
    sums: list[float] = []

    def work(group: Any) -> None:
        sums.extend(summed(group, 1.0) for _ in range(10))

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [float(world_size)] * 30


def test_groups_used_from_several_threads() -> None:
    spawn_ranks(in_threads, 2, backend=BACKEND)


class FileDescriptors(torch.utils.data.Dataset[list[str]]):
    """Descriptors that a forked worker still holds of this process's native core."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[str]:
        names = _descriptors().values()
        with open("/proc/self/maps") as maps:
            mapped = [line for line in maps if "deepytorch" in line and "memfd" in line]
        return [name for name in names if "pidfd" in name or "memfd" in name] + mapped


def _descriptors() -> dict[int, str]:
    """Return what each open descriptor is of, as /proc names it."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


def _first(samples: list[Any]) -> Any:
    return samples[0]


def data_workers(rank: int, world_size: int) -> list[list[str]]:
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True)
    for _ in range(2):
        for (batch,) in loader:
            assert summed(None, batch.sum().item()) == world_size * batch.sum().item()
    assert summed(None, 1.0) == world_size
    inherited = DataLoader(FileDescriptors(), num_workers=1, collate_fn=_first, batch_size=1)
    return list(inherited)


def test_forked_data_workers_inherit_nothing_of_the_core() -> None:
    for inherited in spawn_ranks(data_workers, 2, backend=BACKEND):
        assert inherited == [[], []]


def use_in_forked_child(rank: int, world_size: int) -> str:
    assert summed(None, 1.0) == world_size
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            dist.all_reduce(torch.ones(3))
            text = "no error"
        except RuntimeError as error:
            text = str(error)
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    # The parent's group is none the worse for it.
    assert summed(None, 1.0) == world_size
    return text


def test_forked_child_that_uses_the_group_gets_a_clear_error() -> None:
    for text in spawn_ranks(use_in_forked_child, 2, backend=BACKEND):
        assert "fork" in text
        assert "all_reduce" in text


def child_exits(rank: int, world_size: int) -> None:
    assert summed(None, 1.0) == world_size
    child = os.fork()
    if child == 0:
        dist.destroy_process_group()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert summed(None, 1.0) == world_size


def test_forked_child_may_destroy_its_copy() -> None:
    spawn_ranks(child_exits, 2, backend=BACKEND)


def spawned_from_a_rank(rank: int, world_size: int) -> int:
    """A program that a rank starts inherits no descriptors either."""
    assert summed(None, 1.0) == world_size
    inheritable = [
        name
        for number, name in _descriptors().items()
        if ("memfd" in name or "pidfd" in name) and os.get_inheritable(number)
    ]
    return len(inheritable)


def test_descriptors_close_on_exec() -> None:
    assert spawn_ranks(spawned_from_a_rank, 2, backend=BACKEND) == [0, 0]


def resources() -> dict[str, int]:
    with open("/proc/self/maps") as maps:
        shared = sum("memfd" in line and "deepytorch" in line for line in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared mappings": shared,
    }


def made_and_destroyed(rank: int, world_size: int) -> list[dict[str, int]]:
    measured = []
    for _ in range(12):
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(100), group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.destroy_process_group(group)
        del group, work
        measured.append(resources())
    return measured


def test_groups_give_everything_back() -> None:
    for measured in spawn_ranks(made_and_destroyed, 2, backend=BACKEND):
        # A thread has been joined a moment before the system has taken it off its list.
        more = {name: measured[-1][name] - number for name, number in measured[2].items()}
        assert max(more.values()) <= 0, f"a group leaves something behind: {more}"
