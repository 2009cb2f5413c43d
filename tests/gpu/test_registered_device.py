"""Registered memory on GPUs: collectives on it are right in every mix, however it comes and goes.

With fewer GPUs than ranks the ranks share them, which NCCL does not do: so nothing is delegated.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepytorch_core.c10d import device_memory, registered
from deepytorch_core.testing import needs_gpus, spawn_ranks
from deepytorch_core.testing.tensors import assert_close, rank_gpu, rank_inputs

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(400)]

NATIVE = {
    "DEEPYTORCH_COLLECTIVES": "native",
    "DEEPYTORCH_TUNE": "off",
}
WORLDS = [2, 4]
# In elements of float32, 1 KiB to 64 MiB.
COUNTS = [256, 1027, 16_384, 70_001, 1 << 20, (5 << 20) + 3, 16 << 20]
# In bytes: from here on rules of thumb take the kernels whose peers write to outputs.
LANDS = 16 << 20
PATIENCE_S = 20.0


def _eventually(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def _barrier() -> None:
    dist.all_reduce(torch.zeros(1))  # on the host


def _meet(device: torch.device) -> None:
    """From here on the ranks of the default group have mapped each other's memory, or will."""
    dist.all_reduce(torch.ones(8, device=device))


def _shared(device: torch.device) -> None:
    """Waits until every rank's memory is shared. All ranks call it."""

    def holds() -> bool:
        usage = device_memory.usage(device)
        return usage["shared_bytes"] == usage["chunk_bytes"]

    _eventually(holds, f"not shared: {device_memory.usage(device)}")
    _barrier()


def _blank(
    count: int, device: torch.device, dtype: torch.dtype = torch.float32, *, placed: bool
) -> torch.Tensor:
    if placed:
        return registered.empty(count, dtype=dtype, device=device).fill_(-1)
    return torch.full((count,), -1.0, dtype=dtype, device=device)


def _copy_of(value: torch.Tensor, *, placed: bool) -> torch.Tensor:
    return _blank(value.numel(), value.device, value.dtype, placed=placed).copy_(value)


def _check(
    rank: int,
    world_size: int,
    count: int,
    *,
    placed: bool,
    dtype: torch.dtype = torch.float32,
    group: Any = None,
) -> None:
    """Every collective once, with and without a buffer that is input and output."""
    device = torch.device("cuda", torch.cuda.current_device())
    what = f"of {count} x {dtype} on rank {rank}, registered: {placed}"
    inputs = rank_inputs(count, world_size, dtype, device)
    own = inputs[rank]
    total = torch.stack([each.double() for each in inputs]).sum(0)
    part = slice(rank * count, (rank + 1) * count)

    value = _copy_of(own, placed=placed)
    dist.all_reduce(value, group=group)
    assert_close(value, total, f"all_reduce {what}")
    # Part of a registered tensor, at an odd offset, and the same chunk again.
    if count > 8:
        tail = _copy_of(own, placed=placed)[3:]
        dist.all_reduce(tail, op=dist.ReduceOp.AVG, group=group)
        assert_close(tail, total[3:] / world_size, f"all_reduce of a part {what}")

    gathered = _blank(count * world_size, device, dtype, placed=placed)
    dist.all_gather_into_tensor(gathered, own, group=group)
    assert torch.equal(gathered, torch.cat(inputs)), f"all_gather {what}"
    gathered.fill_(-1)[part].copy_(own)
    dist.all_gather_into_tensor(gathered, gathered[part], group=group)
    assert torch.equal(gathered, torch.cat(inputs)), f"all_gather in place {what}"

    root = count % world_size
    value.copy_(own)
    dist.broadcast(value, group_src=root, group=group)
    assert torch.equal(value, inputs[root]), f"broadcast {what}"

    whole = rank_inputs(count * world_size, world_size, dtype, device)
    received = _blank(count * world_size, device, dtype, placed=placed)
    dist.all_to_all_single(received, whole[rank], group=group)
    assert torch.equal(received, torch.cat([each[part] for each in whole])), f"all_to_all {what}"

    share = torch.stack([each[part].double() for each in whole]).sum(0)
    scattered = _blank(count, device, dtype, placed=placed)
    dist.reduce_scatter_tensor(scattered, whole[rank], group=group)
    assert_close(scattered, share, f"reduce_scatter {what}")
    source = _copy_of(whole[rank], placed=placed)
    dist.reduce_scatter_tensor(source[part], source, group=group)
    assert_close(source[part], share, f"reduce_scatter in place {what}")


def _assert_all_native() -> None:
    from deepytorch_core import _core

    rows = [row for row in _core.statistics() if row["calls"]]
    assert rows
    assert not [row for row in rows if row["algorithm"] in ("delegate", "hierarchical")], rows


def _basics(rank: int, world_size: int) -> None:
    device = rank_gpu(rank)
    early = registered.empty(3, 5, dtype=torch.bfloat16, device=device)
    assert early.shape == (3, 5)
    assert early.dtype == torch.bfloat16
    assert early.device == device
    assert device_memory.empty(0, device=device).numel() == 0
    _meet(device)
    _shared(device)
    assert registered.is_registered(early)
    assert registered.is_registered(early[1:, 2:])
    assert not registered.is_registered(torch.ones(3, device=device))
    with pytest.raises(ValueError, match="negative"):
        registered.empty(2, -1, device=device)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        registered.empty(1 << 45, device=device)

    pool = device_memory.mem_pool(device)
    assert device_memory.mem_pool() is pool
    with torch.cuda.use_mem_pool(pool):
        mine = torch.ones(1 << 20, device=device)
    other = torch.ones(1 << 20, device=device)
    _eventually(lambda: device_memory.is_registered(mine), "a tensor of the pool")
    assert not device_memory.is_registered(other)
    _shared(device)
    dist.all_reduce(mine)
    assert mine.eq(world_size).all()

    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    assert backend.supports_tensor_alloc(device)
    given = backend.allocate_tensor(1000, dtype=torch.float32, device=device)
    assert given.shape == (1000,)
    _eventually(lambda: device_memory.is_registered(given), "a tensor of the group")


@pytest.mark.parametrize("world_size", WORLDS)
def test_memory_is_registered_and_gets_shared(world_size: int) -> None:
    _spawn(_basics, world_size)


def _every_mix(rank: int, world_size: int, counts: list[int], dtype: torch.dtype) -> None:
    from deepytorch_core import _core

    device = rank_gpu(rank)
    _meet(device)
    _core.reset_statistics()
    everyone = (1 << world_size) - 1
    for count in counts:
        for mask in sorted({0, 1, 5 & everyone, everyone - 1, everyone}):
            placed = bool(mask >> rank & 1)
            _check(rank, world_size, count, placed=placed, dtype=dtype)
            # The first time its chunks may be on their way; from now on they are there.
            _shared(device)
            before = _core.landing_calls()
            _check(rank, world_size, count, placed=placed, dtype=dtype)
            large = count * dtype.itemsize >= LANDS
            if large or not placed:
                assert (_core.landing_calls() > before) == placed
    torch.cuda.synchronize()
    _assert_all_native()


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_mix_of_registered_and_ordinary_tensors(dtype: torch.dtype, world_size: int) -> None:
    _spawn(_every_mix, world_size, COUNTS, dtype, timeout_s=380)


def _comes_and_goes(rank: int, world_size: int, rounds: int) -> None:
    device = rank_gpu(rank)
    _meet(device)
    kept: list[torch.Tensor] = []
    for turn in range(rounds):
        count = [1 << 20, 70_001, 3 << 20, 5][turn % 4] + turn
        _check(rank, world_size, count, placed=(turn + rank) % 3 != 0)
        kept.append(registered.empty(1 << 18, device=device).fill_(turn))
        if turn % 3 == rank % 3:
            registered.trim()
        if turn % 5 == 0:
            torch.cuda.empty_cache()
        if turn % 7 == 6:
            assert all(tensor.eq(tensor[0]).all() for tensor in kept)
            kept.clear()
    kept.clear()
    gc.collect()
    registered.trim()
    assert device_memory.usage(device) == {"chunk_bytes": 0, "shared_bytes": 0}
    _barrier()
    again = registered.empty(1 << 20, device=device).fill_(1)
    _shared(device)
    dist.all_reduce(again)
    assert again.eq(world_size).all()


@pytest.mark.parametrize("world_size", WORLDS)
def test_memory_is_freed_and_made_again(world_size: int) -> None:
    _spawn(_comes_and_goes, world_size, 40, timeout_s=380, fresh=True)


def _freed_memory_is_gone(rank: int, world_size: int) -> None:
    """Free memory of rank 0: the device has it back, though the others had it mapped."""
    device = rank_gpu(rank)
    _meet(device)
    size = 1 << 30
    for _ in range(3):
        before = torch.cuda.mem_get_info(device)[0]
        _barrier()
        large = registered.empty(size, dtype=torch.uint8, device=device) if rank == 0 else None
        _shared(device)
        if rank == 0:
            assert device_memory.usage(device)["shared_bytes"] >= size
            del large
            assert registered.trim() >= size
            left = torch.cuda.mem_get_info(device)[0]
            assert left > before - size // 2, f"{before - left} bytes are missing"
        _barrier()


def test_freed_memory_is_gone() -> None:
    _spawn(_freed_memory_is_gone, 2)


def _makes_room(rank: int, world_size: int) -> None:
    """Take registered memory although torch's cache keeps most memory: it gives way."""
    device = rank_gpu(rank)
    if rank == 0:
        gc.collect()
        torch.cuda.empty_cache()
        most = torch.cuda.mem_get_info(device)[0] // 4 * 3
        cached = torch.empty(most, dtype=torch.uint8, device=device)
        del cached
        large = registered.empty(most, dtype=torch.uint8, device=device)
        del large
        assert registered.trim() >= most
    _barrier()


def test_the_cache_makes_room_for_registered_memory() -> None:
    _spawn(_makes_room, 2)


def _several_groups(rank: int, world_size: int) -> None:
    device = rank_gpu(rank)
    early = registered.empty(1 << 20, device=device)
    world = list(range(world_size))
    groups = [(dist.new_group(world), world) for _ in range(2)]
    for pair in [world[:2], world[-2:]]:
        made = dist.new_group(pair)
        if rank in pair:
            groups.append((made, pair))
    for turn in range(3):
        for group, ranks in groups:
            place = ranks.index(rank)
            for count in (1027, (1 << 20) + turn):
                placed = (turn + place) % 2 == 0
                _check(place, len(ranks), count, placed=placed, group=group)
            early.fill_(place)
            dist.all_reduce(early, group=group)
            assert early.eq(sum(range(len(ranks)))).all()
    _shared(device)
    assert device_memory.is_registered(early)


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_groups_share_the_memory(world_size: int) -> None:
    _spawn(_several_groups, world_size, timeout_s=380)


def _graphs(rank: int, world_size: int, replays: int) -> None:
    device = rank_gpu(rank)
    _meet(device)
    values = [registered.empty(count, device=device) for count in (1000, 1 << 20, 8 << 20)]
    gathered = registered.empty(1000 * world_size, device=device)
    for value in values:
        value.fill_(1)
    _shared(device)
    for value in values:
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
    graphs = []
    for value in values:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(value, op=dist.ReduceOp.AVG)
            dist.all_gather_into_tensor(gathered, values[0])
            with pytest.raises(RuntimeError, match="while a graph captures"):
                registered.empty(3, device=device)
        graphs.append(graph)
    for turn in range(replays):
        for value in values:
            value.fill_(turn + rank)
        for graph in graphs:
            graph.replay()
        # Chunks come, go and are mapped while graphs run.
        other = registered.empty(3 << 20, device=device).fill_(rank)
        dist.all_reduce(other)
        if turn % 5 == 0:
            mean = turn + (world_size - 1) / 2
            for value in [*values, gathered]:
                torch.testing.assert_close(value, torch.full_like(value, mean))
            assert other.eq(sum(range(world_size))).all()
            del other
            registered.trim()
    torch.cuda.synchronize()


@pytest.mark.parametrize("world_size", WORLDS)
def test_graphs_are_replayed_on_registered_tensors(world_size: int) -> None:
    _spawn(_graphs, world_size, 30)


def _other_streams(rank: int, world_size: int) -> None:
    device = rank_gpu(rank)
    _meet(device)
    side = torch.cuda.Stream(device)
    for turn in range(20):
        value = registered.empty(1 << 20, device=device).fill_(rank + turn)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            dist.all_reduce(value)
            value.record_stream(side)
            result = value.sum() / value.numel()
        del value  # and the next one may get its memory, but not too early
        torch.cuda.current_stream(device).wait_stream(side)
        assert result.item() == sum(range(world_size)) + turn * world_size


def test_memory_knows_the_streams_that_use_it() -> None:
    _spawn(_other_streams, 2)


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(300, 700), nn.GELU(), nn.Linear(700, 300), nn.Linear(300, 7))


def _batch(world_size: int) -> torch.Tensor:
    return torch.randn(4 * world_size, 300, generator=torch.Generator().manual_seed(2))


def _train_alone(world_size: int, device: torch.device, steps: int) -> list[torch.Tensor]:
    model, batch = _model().to(device), _batch(world_size).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _ddp(rank: int, world_size: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    device = rank_gpu(rank)
    with registered.place_ddp_buckets():
        model = DistributedDataParallel(
            _model().to(device), device_ids=[device], gradient_as_bucket_view=True, bucket_cap_mb=1
        )
    batch = _batch(world_size).to(device)[rank * 4 : rank * 4 + 4]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        _eventually(lambda bucket=gradient: device_memory.is_registered(bucket), "a bucket")  # type: ignore[misc]
    for parameter, expected in zip(
        model.parameters(), _train_alone(world_size, device, 5), strict=True
    ):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)


def test_ddp_reduces_registered_buckets() -> None:
    _spawn(_ddp, 2)


def _fsdp2(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    device = rank_gpu(rank)
    _meet(device)
    registered.trim()
    before = device_memory.usage(device)["chunk_bytes"]
    mesh = init_device_mesh("cuda", (world_size,))
    model: Any = _model().to(device)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    batch = _batch(world_size).to(device)[rank * 4 : rank * 4 + 4]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    assert device_memory.usage(device)["chunk_bytes"] > before
    _shared(device)
    for parameter, expected in zip(
        model.parameters(), _train_alone(world_size, device, 5), strict=True
    ):
        torch.testing.assert_close(parameter.full_tensor().detach(), expected, rtol=1e-4, atol=1e-5)


def test_fsdp2_takes_registered_buffers() -> None:
    _spawn(_fsdp2, 2)


def _expandable(rank: int, world_size: int) -> None:
    device = rank_gpu(rank)
    _meet(device)
    value = registered.empty(1 << 20, device=device).fill_(1)
    _shared(device)
    assert device_memory.is_registered(value)
    dist.all_reduce(value)
    assert value.eq(world_size).all()


def test_expandable_segments_change_nothing() -> None:
    env = {**NATIVE, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    _spawn(_expandable, 2, env=env, fresh=True)


def _spawn(function: Any, world_size: int, *arguments: Any, **more: Any) -> list[Any]:
    settings = {"env": NATIVE, **more}
    return spawn_ranks(
        function, world_size, *arguments, backend="cuda:deepytorch,cpu:deepytorch", **settings
    )
