"""Registered memory: tensors in it, mixed with others, in DDP and FSDP2; and what is left of it."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepytorch_core.c10d import registered
from deepytorch_core.testing import assert_same_on_all_ranks, rank_store, spawn_ranks

BACKEND = "deepytorch"
MIB = 1 << 20


def in_use() -> int:
    from deepytorch_core import _core

    gc.collect()
    return _core.registered_memory()["in_use_bytes"]


def mapped_pools() -> int:
    maps = Path("/proc/self/maps").read_text()
    return sum("memfd:deepytorch-memory" in line for line in maps.splitlines())


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def numbers(count: int, rank: int, *, placed: bool) -> torch.Tensor:
    values = torch.arange(count, dtype=torch.float32) % 97 + rank
    if not placed:
        return values
    tensor = registered.empty(count, dtype=torch.float32)
    return tensor.copy_(values)


def blank(count: int, *, placed: bool) -> torch.Tensor:
    return (registered.empty(count) if placed else torch.empty(count)).fill_(-1)


def every_mix(rank: int, world_size: int) -> None:
    for count in (1, 700, 90_001):
        for mask in range(1 << world_size):
            placed = bool(mask >> rank & 1)
            collectives_are_right(rank, world_size, count, placed)


def collectives_are_right(rank: int, world_size: int, count: int, placed: bool) -> None:
    plain = [numbers(count, peer, placed=False) for peer in range(world_size)]
    total = torch.stack(plain).sum(0)

    tensor = numbers(count, rank, placed=placed)
    assert registered.is_registered(tensor) == placed
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total)

    # Any of the inputs and outputs may be registered.
    for inside, outside in ((placed, placed), (placed, False), (False, placed)):
        own = numbers(count, rank, placed=inside)
        gathered = blank(count * world_size, placed=outside)
        dist.all_gather_into_tensor(gathered, own)
        assert torch.equal(gathered, torch.cat(plain))

        whole = numbers(count * world_size, rank, placed=inside)
        sent = [numbers(count * world_size, peer, placed=False) for peer in range(world_size)]
        share = blank(count, placed=outside)
        dist.reduce_scatter_tensor(share, whole)
        expected = sum(
            numbers(count * world_size, peer, placed=False) for peer in range(world_size)
        )
        assert torch.equal(share, expected[rank * count :][:count])

        exchanged = blank(count * world_size, placed=outside)
        dist.all_to_all_single(exchanged, whole)
        assert torch.equal(
            exchanged, torch.cat([values[rank * count :][:count] for values in sent])
        )

    tensor = numbers(count, rank, placed=placed)
    dist.broadcast(tensor, src=world_size - 1)
    assert torch.equal(tensor, plain[world_size - 1])

    # A part of a registered tensor, in place and at an odd offset.
    part = numbers(count + 3, rank, placed=placed)[3:]
    before = [numbers(count + 3, peer, placed=False)[3:] for peer in range(world_size)]
    dist.all_reduce(part)
    assert torch.equal(part, torch.stack(before).sum(0))


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_mix_of_registered_and_ordinary_tensors(world_size: int) -> None:
    spawn_ranks(every_mix, world_size, backend=BACKEND)


def shapes_and_errors(rank: int, world_size: int) -> None:
    assert registered.empty().shape == ()
    assert registered.empty(0, 3).shape == (0, 3)
    assert registered.empty([2, 3]).shape == registered.empty(2, 3).shape
    tensor = registered.empty(4, 5, dtype=torch.bfloat16)
    assert tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 256 == 0
    assert registered.is_registered(tensor[:, 1:])
    assert not registered.is_registered(torch.empty(4))
    assert not registered.is_registered(tensor.clone())

    with pytest.raises(ValueError, match="negative"):
        registered.empty(2, -1)
    with pytest.raises(RuntimeError, match="registered memory is exhausted"):
        registered.empty(1 << 50)
    gloo = dist.new_group(backend="gloo")
    assert not registered.is_registered(tensor, gloo)
    with pytest.raises(RuntimeError, match="a group whose CPU tensors deepytorch serves"):
        registered.empty(3, group=gloo)

    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"allocate_tensor on meta.*torch\.empty"):
        backend.allocate_tensor(3, dtype=torch.float32, device=torch.device("meta"))


def test_shapes_and_errors() -> None:
    spawn_ranks(shapes_and_errors, 2, backend=BACKEND)


def switched_to_stock(rank: int, world_size: int) -> None:
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert not backend.supports_tensor_alloc(torch.device("cpu"))
    with registered.place_ddp_buckets():
        model = DistributedDataParallel(nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()
    assert in_use() == 0


def test_nothing_is_registered_with_stock_collectives() -> None:
    env = {"DEEPYTORCH_COLLECTIVES": "stock"}
    spawn_ranks(switched_to_stock, 2, backend=BACKEND, env=env)


def survives_its_group(rank: int, world_size: int) -> None:
    from deepytorch_core.c10d import backend as deepytorch_backend

    deepytorch_backend.register()

    def open_group(name: str) -> None:
        dist.init_process_group(BACKEND, store=rank_store(name), rank=rank, world_size=world_size)
        dist.barrier()

    open_group("first")
    tensor = registered.empty(MIB).fill_(rank)
    dist.destroy_process_group()
    after_first = num_descriptors()
    assert mapped_pools() == 1, "only this process's own"
    assert torch.equal(tensor, torch.full((MIB,), float(rank)))
    for cycle in range(5):
        open_group(f"cycle{cycle}")
        assert mapped_pools() == world_size
        # It is as good as new in a group that came after it.
        assert registered.is_registered(tensor)
        tensor.fill_(rank)
        dist.all_reduce(tensor)
        assert tensor[0] == sum(range(world_size))
        dist.destroy_process_group()
        assert num_descriptors() == after_first
        assert mapped_pools() == 1
    assert in_use() == 4 * MIB
    del tensor
    assert in_use() == 0
    assert registered.trim() == 0  # without groups the last tensor gives all of it back


def test_tensors_survive_their_group_and_nothing_else_does() -> None:
    spawn_ranks(survives_its_group, 3)


def many_groups(rank: int, world_size: int) -> None:
    groups = [dist.new_group() for _ in range(64)]
    tensor = registered.empty(5000)
    for group in groups:
        tensor.fill_(rank)
        dist.all_reduce(tensor, group=group)
        assert tensor[-1] == sum(range(world_size))
    assert mapped_pools() == world_size


def test_64_groups_map_each_process_once() -> None:
    spawn_ranks(many_groups, 2, backend=BACKEND)


def forks(rank: int, world_size: int) -> None:
    dist.barrier()
    tensor = registered.empty(1000).fill_(rank + 5)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            assert torch.equal(tensor, torch.full((1000,), float(rank + 5)))
            assert mapped_pools() == 1
            links = [
                os.readlink(f"/proc/self/fd/{name}")
                for name in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{name}")
            ]
            assert not any("memfd:deepytorch" in link for link in links), links
            with contextlib.suppress(RuntimeError, ValueError):
                registered.empty(3)
                raise AssertionError("a forked child got registered memory")
            del tensor
            gc.collect()
            said = "fine"
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 10_000).decode()
    assert said == "fine", said
    os.close(reader)
    os.close(writer)
    # Memory that the child freed is still ours.
    assert in_use() == 4096
    other = registered.empty(1000).fill_(-1)
    assert tensor[0] == rank + 5
    assert other.data_ptr() != tensor.data_ptr()


def test_a_forked_child_reads_but_frees_nothing() -> None:
    spawn_ranks(forks, 2, backend=BACKEND)


def with_little_address_space(rank: int, world_size: int, times_of_memory: float) -> None:
    from deepytorch_core.c10d import backend as deepytorch_backend

    deepytorch_backend.register()
    dist.init_process_group(BACKEND, store=rank_store("w"), rank=rank, world_size=world_size)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    capacity = min(memory, 256 << 30)
    if rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + int(times_of_memory * capacity)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    tensor = torch.full((90_000,), float(rank))
    dist.all_reduce(tensor)
    assert tensor[-1] == 1.0
    if rank == 1 and times_of_memory < 1:
        with pytest.raises(RuntimeError, match="ulimit -v"):
            registered.empty(10)
    else:
        tensor = registered.empty(90_000).fill_(rank)
        assert mapped_pools() == 1, "no peer's, where one rank has none"
    tensor.fill_(rank)
    dist.all_reduce(tensor)
    assert tensor[-1] == 1.0
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.destroy_process_group()


@pytest.mark.parametrize("times_of_memory", [0.5, 1.5])
def test_a_rank_that_can_map_no_pool_leaves_the_group_whole(times_of_memory: float) -> None:
    """With half the address space it has no pool of its own, with more it has no peer's."""
    spawn_ranks(with_little_address_space, 2, times_of_memory, fresh=True)


# Training.


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(301, 401), nn.GELU(), nn.Linear(401, 401), nn.Linear(401, 7))


def train(model: nn.Module, rank: int, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(5, 301, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(rank: int, world_size: int, how: str, *, views: bool) -> tuple[list[float], Any]:
    """Losses, and for every bucket size whether such buckets were registered."""
    from torch._C._distributed_c10d import Reducer

    from deepytorch_core.c10d import activation
    from deepytorch_core.c10d import backend as deepytorch_backend

    originals = (vars(Reducer)["__init__"], vars(Reducer)["_rebuild_buckets"])
    deepytorch_backend.register()
    if how == "activation":
        activation.activate()
    name = "gloo" if how in {"gloo", "activation"} else BACKEND
    dist.init_process_group(name, store=rank_store(how), rank=rank, world_size=world_size)
    inside = registered.place_ddp_buckets() if how == "explicit" else contextlib.nullcontext()
    with inside:
        model = DistributedDataParallel(
            make_model(), bucket_cap_mb=0.5, gradient_as_bucket_view=views
        )
    seen: list[tuple[int, bool]] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        seen.append((buffer.numel(), registered.is_registered(buffer)))
        work = dist.all_reduce(buffer.div_(world_size), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    hook.__annotations__ = {}  # torch wants types there, not their names
    model.register_comm_hook(None, hook)
    losses = train(model, rank)
    assert model._has_rebuilt_buckets
    sizes = Counter(size for size, _ in seen)
    assert len(sizes) > 1, "the rebuild changed the buckets"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if how in {"activation", "explicit"}:
        # DDP takes what it needs anyway, rounded up to 256 bytes for each bucket, and nothing else.
        assert 4 * parameters <= in_use() <= 4 * parameters + 256 * len(sizes)
    if how == "gloo":
        # Gloo's own destructor can wait for a thread that waits for Python's lock.
        del model
        dist.destroy_process_group()
        return losses, seen
    dist.destroy_process_group()
    if how == "activation":
        activation.deactivate()
        assert (vars(Reducer)["__init__"], vars(Reducer)["_rebuild_buckets"]) == originals
    # The buckets outlive the group in use: one more pass without communication.
    with model.no_sync():
        model(torch.zeros(1, 301)).sum().backward()
    del model
    assert in_use() == 0
    return losses, seen


@pytest.mark.parametrize("views", [pytest.param(False, marks=pytest.mark.extended), True])
def test_ddp_buckets(views: bool) -> None:
    def run(how: str) -> list[Any]:
        return spawn_ranks(ddp, 2, how, views=views, fresh=True)

    reference = run("gloo")
    for how, placed in (("plain", False), ("activation", True), ("explicit", True)):
        for (losses, seen), (expected, _) in zip(run(how), reference, strict=True):
            assert losses == expected, how
            assert {was for _, was in seen} == {placed}, (how, seen)


def placement_is_refused(rank: int, world_size: int) -> list[str]:
    said: list[str] = []
    registered.say_once = lambda line, *, level: said.append(f"{level}: {line}")  # type: ignore
    gloo = dist.new_group(backend="gloo")
    with registered.place_ddp_buckets():
        model = DistributedDataParallel(nn.Linear(3, 3), process_group=gloo)
    model(torch.ones(1, 3)).sum().backward()
    assert in_use() == 0
    return said


def test_explicit_placement_says_where_it_cannot() -> None:
    for said in spawn_ranks(placement_is_refused, 2, backend=BACKEND, fresh=True):
        assert said == [
            "warning: the buckets of a DDP module stay in ordinary memory: deepytorch does not "
            "serve its group's CPU tensors natively"
        ]


def fsdp2(rank: int, world_size: int, registered_buffers: bool) -> list[float]:
    from deepytorch_core import _core

    model: Any = make_model()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if registered_buffers:
        for module in model.modules():
            if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
                module.set_allocate_memory_from_process_group_for_comm(True)
    losses = train(model, rank)
    assert_same_on_all_ranks(len(losses), "steps")
    if registered_buffers:
        assert _core.registered_memory()["reserved_bytes"] > 4 * 401 * 401
    return losses


def test_fsdp2_takes_its_buffers_from_the_backend() -> None:
    expected = spawn_ranks(fsdp2, 2, False, backend="gloo")
    assert spawn_ranks(fsdp2, 2, True, backend=BACKEND, fresh=True) == expected
