"""GPU tensors go to NCCL through the backend: same results, same losses, and counted as such."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import needs_gpus, spawn_ranks
from deepytorch_core.testing.tensors import rank_gpu

pytestmark = [pytest.mark.gpu, needs_gpus(2)]


def _collectives(rank: int, world_size: int) -> dict[str, list[float]]:
    device = rank_gpu(rank)
    torch.manual_seed(rank)
    value = torch.randn(1001, device=device)
    results: dict[str, torch.Tensor] = {}
    results["all_reduce"] = value.clone()
    dist.all_reduce(results["all_reduce"], op=dist.ReduceOp.AVG)
    gathered = [torch.empty_like(value) for _ in range(world_size)]
    dist.all_gather(gathered, value)
    results["all_gather"] = torch.cat(gathered)
    results["broadcast"] = value.clone()
    dist.broadcast(results["broadcast"], world_size - 1)
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    work.wait()
    results["asynchronous"] = value
    sent = torch.full((3,), float(rank), device=device)
    received = torch.empty_like(sent)
    peer = world_size - 1 - rank
    if peer != rank:
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        assert received.eq(peer).all()
    dist.barrier()
    torch.cuda.synchronize()
    return {name: result.tolist() for name, result in results.items()}


def _computes_on(rank: int, world_size: int) -> bool:
    """Whether what rank 0 computes goes on while asynchronous operations wait for the others."""
    from deepytorch_core import _core

    device = rank_gpu(rank)
    small, large = torch.ones(1 << 10, device=device), torch.ones(1 << 24, device=device)
    store = dist.distributed_c10d._get_default_store()

    def reduce_both() -> list[dist.Work | None]:
        native = dist.all_reduce(small, async_op=True)
        return [native, dist.reduce(large, 0, async_op=True)]  # NCCL's: there is no kernel for it

    for work in reduce_both():  # connections, and what serves which
        assert work is not None
        work.wait()
    torch.cuda.synchronize()
    if rank > 0:
        store.wait(["computed"], timedelta(seconds=30))
    works = reduce_both()
    computed = torch.cuda.current_stream().record_event()
    end = time.monotonic() + 5
    while rank == 0 and not computed.query() and time.monotonic() < end:
        time.sleep(0.01)
    went_on = computed.query()
    if rank == 0:
        store.set("computed", "")
    for work in works:
        assert work is not None
        work.wait()
    torch.cuda.synchronize()
    assert small[-1].item() == 4.0
    assert rank > 0 or large[-1].item() == 3.0
    rows = [row for row in _core.statistics() if row["op"] in ("all_reduce", "reduce")]
    assert {row["algorithm"] == "delegate" for row in rows} == {True, False}
    return went_on


def _lists(rank: int, world_size: int) -> list[list[float]]:
    """Run thrice on lists of small and large tensors; return the first and last of each result."""
    device = rank_gpu(rank)
    torch.manual_seed(rank)
    sizes = [1001, 1 << 24, 7, 1 << 22]
    found = []
    for _ in range(3):
        parts = [torch.randn(size, device=device) for size in sizes]
        wholes = [torch.randn(world_size * size, device=device) for size in sizes]
        with dist._coalescing_manager(async_ops=True) as reduced:
            for part in parts:
                dist.all_reduce(part)
        reduced.wait()
        gathered = [torch.empty_like(whole) for whole in wholes]
        with dist._coalescing_manager():
            for whole, part in zip(gathered, parts, strict=True):
                dist.all_gather_into_tensor(whole, part)
        scattered = [torch.empty_like(part) for part in parts]
        with dist._coalescing_manager(async_ops=True) as scattering:
            for part, whole in zip(scattered, wholes, strict=True):
                dist.reduce_scatter_tensor(part, whole)
        scattering.wait()
        results = [*parts, *gathered, *scattered]
        found.append([value for each in results for value in (each[0].item(), each[-1].item())])
    return found


def _delegated_reasons(rank: int, world_size: int) -> set[str]:
    from deepytorch_core import _core

    _core.reset_statistics()
    value = torch.ones(8, device=rank_gpu(rank))
    dist.all_reduce(value)
    torch.cuda.synchronize()
    assert value.eq(world_size).all()
    dist.reduce(value, 0)
    torch.cuda.synchronize()
    on_host = torch.ones(8)
    dist.all_reduce(on_host)
    assert on_host.eq(world_size).all()
    return {f"{row['algorithm']}: {row['reason']}" for row in _core.statistics()}


def _losses(rank: int, world_size: int, wrapper: str) -> list[float]:
    device = rank_gpu(rank)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
    if wrapper == "ddp":
        model = DistributedDataParallel(model, device_ids=[device])
    else:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    losses = []
    for _ in range(5):
        loss = model(torch.randn(16, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _activated(rank: int, world_size: int, address: str) -> tuple[str, float]:
    import deepytorch

    device = rank_gpu(rank)
    deepytorch.activate()
    dist.init_process_group(
        "nccl", init_method=f"file://{address}", rank=rank, world_size=world_size, device_id=device
    )
    value = torch.ones(4, device=device)
    dist.all_reduce(value)
    name = serving_name()
    result = value[0].item()
    dist.destroy_process_group()
    deepytorch.deactivate()
    return name, result


def _delegated_behind_native(rank: int, world_size: int) -> float:
    device = rank_gpu(rank)
    value = torch.full((1 << 26,), float(rank + 1), device=device)
    dist.all_reduce(value, async_op=True)  # 3 on both ranks, once it is over
    dist.reduce(value, 0)  # 6 on rank 0; delegated, as those below
    dist.reduce(value, 1)  # 9 on rank 1
    other = torch.cuda.Stream(device)
    with torch.cuda.stream(other):
        dist.reduce(value, 0)  # 15 on rank 0
    other.synchronize()
    assert value.eq(value[0]).all()
    return value[0].item()


def test_results_are_nccls() -> None:
    ours = spawn_ranks(_collectives, 2, backend="deepytorch")
    stock = spawn_ranks(_collectives, 2, backend="nccl")
    assert ours == stock


def test_a_program_computes_on_beside_native_and_nccls_operations() -> None:
    """Its stream waits for neither, though NCCL's operation comes behind the native one."""
    native = {"DEEPYTORCH_COLLECTIVES": "native"}
    assert spawn_ranks(_computes_on, 2, backend="deepytorch", env=native)[0]


def test_what_is_delegated_says_why() -> None:
    for seen in spawn_ranks(_delegated_reasons, 2, backend="deepytorch"):
        assert "delegate: no GPU kernel for reduce" in seen
        assert any(entry.startswith("low_latency") for entry in seen), seen
        assert any(entry.startswith("one_shot") for entry in seen), seen


@pytest.mark.parametrize("peers", ["0", "1"])  # NCCL_P2P_DISABLE
@pytest.mark.parametrize("collectives", ["auto", "native"])
def test_lists_give_what_nccl_gives(collectives: str, peers: str) -> None:
    chosen = {"DEEPYTORCH_COLLECTIVES": collectives, "NCCL_P2P_DISABLE": peers}
    ours = spawn_ranks(_lists, 2, backend="deepytorch", env=chosen)
    assert ours == spawn_ranks(_lists, 2, backend="nccl", env={"NCCL_P2P_DISABLE": peers})


@pytest.mark.parametrize("collectives", ["auto", "native"])
def test_delegated_operations_are_behind_the_native_one(collectives: str) -> None:
    chosen = {"DEEPYTORCH_COLLECTIVES": collectives}
    ours = spawn_ranks(_delegated_behind_native, 2, backend="deepytorch", env=chosen)
    assert ours == [15.0, 9.0]


@pytest.mark.parametrize("collectives", ["auto", "native"])  # delegated, our kernels
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_losses_are_nccls(wrapper: str, collectives: str) -> None:
    chosen = {"DEEPYTORCH_COLLECTIVES": collectives}
    ours = spawn_ranks(_losses, 2, wrapper, backend="deepytorch", env=chosen)
    assert ours == spawn_ranks(_losses, 2, wrapper, backend="nccl")


def test_import_takes_over_nccl(tmp_path: os.PathLike[str]) -> None:
    outcome = spawn_ranks(_activated, 2, os.path.join(tmp_path, "store"), fresh=True)
    assert outcome == [("deepytorch", 2.0)] * 2


def _barrier_rows(rank: int, world_size: int, address: str) -> list[str]:
    import deepytorch
    from deepytorch_core import _core

    device = rank_gpu(rank)
    deepytorch.activate()
    dist.init_process_group(
        "nccl", init_method=f"file://{address}", rank=rank, world_size=world_size
    )
    _core.reset_statistics()
    value = torch.zeros(1 << 20, device=device)
    for _ in range(100):
        value += 1
    dist.barrier()
    rows = [str(row["algorithm"]) for row in _core.statistics() if row["op"] == "barrier"]
    dist.destroy_process_group()
    deepytorch.deactivate()
    return rows


def test_barrier_of_a_gpu_only_group_is_nccls(tmp_path: os.PathLike[str]) -> None:
    rows = spawn_ranks(_barrier_rows, 2, os.path.join(tmp_path, "store"), fresh=True)
    assert rows == [["delegate"]] * 2
