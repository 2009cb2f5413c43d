"""CPU-Reduce on GPUs without peer access, emulated by NCCL_P2P_DISABLE=1.

With fewer GPUs than ranks the ranks share them, which NCCL does not do: so most of this asks for
native code alone. Every wait is short: a fault shows as a failure within a minute, not as a hang.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepytorch_core.testing import assert_same_on_all_ranks, needs_gpus, spawn_ranks
from deepytorch_core.testing.tensors import assert_close, rank_gpu, rank_inputs, reduced, shifted

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(150)]

EMULATED = {"NCCL_P2P_DISABLE": "1"}
NATIVE = {
    **EMULATED,
    "DEEPYTORCH_COLLECTIVES": "native",
    "DEEPYTORCH_TUNE": "off",
    "DEEPYTORCH_ERROR_HANDLING": "raise",
}
BACKEND = "cuda:deepytorch,cpu:deepytorch"
WORLDS = [2, 4]
# In elements: one, odd ones, one chunk, many with a remainder.
COUNTS = [1, 127, 4099, 262_144, (9 << 20) + 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


def _spawn(function: Any, world_size: int, *arguments: Any, **more: Any) -> list[Any]:
    settings = {"env": NATIVE, "timeout_s": 60.0, "backend": BACKEND, **more}
    return spawn_ranks(function, world_size, *arguments, **settings)


def _assert_only_cpu_reduce() -> None:
    """Everything went through the host, and no peer's memory was mapped."""
    from deepytorch_core import _core

    rows = [row for row in _core.statistics() if row["calls"]]
    assert {str(row["algorithm"]) for row in rows} == {"cpu_reduce"}, rows
    assert _core.peer_mappings() == 0


def _one(rank: int, world_size: int) -> float:
    """The least that can work: one chunk."""
    value = torch.full((1000,), float(rank + 1), device=rank_gpu(rank))
    dist.all_reduce(value)
    torch.cuda.synchronize()
    assert value.eq(world_size * (world_size + 1) / 2).all()
    _assert_only_cpu_reduce()
    return value[0].item()


def _results(rank: int, world_size: int, num_nodes: int = 1) -> None:
    device = rank_gpu(rank)
    for dtype in DTYPES:
        for shift, count in enumerate(COUNTS):
            for name in ["sum"] if count > 5000 else OPS:
                what = f"{name} of {count} x {dtype} on rank {rank}"
                inputs = rank_inputs(count, world_size, dtype, device)
                value = shifted(inputs[rank], shift % 5)
                dist.all_reduce(value, op=OPS[name])
                assert_close(value, reduced(inputs, name), f"all_reduce {what}")
                assert_same_on_all_ranks(value, what.rpartition(" on ")[0])

                part_count = max(1, count // world_size)
                whole = rank_inputs(part_count * world_size, world_size, dtype, device)
                part = torch.empty(part_count, dtype=dtype, device=device)
                dist.reduce_scatter_tensor(part, shifted(whole[rank], shift % 3), op=OPS[name])
                own = slice(rank * part_count, (rank + 1) * part_count)
                assert_close(part, reduced(whole, name)[own], f"reduce_scatter {what}")
    for count in COUNTS:
        inputs = rank_inputs(count, world_size, torch.bfloat16, device)
        gathered = torch.empty(count * world_size, dtype=torch.bfloat16, device=device)
        dist.all_gather_into_tensor(gathered, inputs[rank])
        assert torch.equal(gathered, torch.cat(inputs)), f"all_gather of {count}"
        own = gathered[rank * count : (rank + 1) * count]
        gathered.zero_()
        own.copy_(inputs[rank])
        dist.all_gather_into_tensor(gathered, own)
        assert torch.equal(gathered, torch.cat(inputs)), f"all_gather in place of {count}"
        if num_nodes > 1:
            continue  # broadcasts between nodes are the stock backend's
        root = count % world_size
        value = inputs[rank].clone()
        dist.broadcast(value, root)
        assert torch.equal(value, inputs[root]), f"broadcast of {count}"
    torch.cuda.synchronize()
    _assert_only_cpu_reduce()


def _lists(rank: int, world_size: int) -> None:
    """Tensors of an allocation each, upwards and downwards in memory, and views of one."""
    device = rank_gpu(rank)
    torch.cuda.empty_cache()
    count = (4 << 20) + 3  # PyTorch's allocator gives each such tensor memory of its own
    inputs = rank_inputs(count, world_size, torch.float32, device)
    parts = sorted((torch.empty_like(each) for each in inputs), key=torch.Tensor.data_ptr)
    buffer = torch.empty(count * world_size, device=device)
    layouts = {"upwards": parts, "downwards": parts[::-1], "views": list(buffer.chunk(world_size))}
    for turn, (layout, places) in enumerate(layouts.items(), 1):
        # The own part of a sum stays on the GPU, so that of two ranks one is left.
        for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
            for part, value in zip(places, inputs, strict=True):
                part.copy_(value * (turn + rank))
            share = torch.empty(count, device=device)
            dist.reduce_scatter(share, places, op=op)
            given = [inputs[rank] * (turn + peer) for peer in range(world_size)]
            assert_close(share, reduced(given, name), f"{name} of {layout} on rank {rank}")
        dist.all_gather(places, inputs[rank] * turn)
        for part, value in zip(places, inputs, strict=True):
            assert torch.equal(part, value * turn), f"all_gather of {layout} on rank {rank}"
    torch.cuda.synchronize()
    _assert_only_cpu_reduce()


def _dropped(rank: int, world_size: int, through_host: bool) -> None:
    """Nobody keeps the work, and its input's memory is asked for again while others are late."""
    device = rank_gpu(rank)
    count = 16 << 20
    dist.all_reduce(torch.ones(1000, device=device))  # connects
    part = torch.full((count,), rank + 1.0, device=device)
    gathered = torch.empty(world_size, count, device=device)
    torch.cuda.synchronize()
    if rank > 0:
        time.sleep(0.5)
    dist.all_gather_into_tensor(gathered, part, async_op=True)
    del part
    other = torch.full((count,), -1.0, device=device)
    torch.cuda.synchronize()
    assert other.eq(-1).all()
    for peer in range(world_size):
        assert gathered[peer].eq(peer + 1).all(), f"of rank {peer} on rank {rank}"
    from deepytorch_core import _core

    used = {str(row["algorithm"]) for row in _core.statistics() if row["calls"]}
    assert "delegate" not in used
    assert ("cpu_reduce" in used) == through_host, used


def _groups(rank: int, world_size: int, rounds: int, num_groups: int) -> None:
    """Groups on streams of their own, issued in opposite orders, beside matrix products."""
    device = rank_gpu(rank)
    groups = [dist.new_group(list(range(world_size))) for _ in range(num_groups)]
    values = [torch.ones(300_000 * (i + 1), device=device) for i in range(len(groups))]
    for group, value in zip(groups, values, strict=True):
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group)
    matrix = torch.randn(1024, 1024, device=device)
    for turn in range(rounds):
        order = list(range(len(groups)))
        if (rank + turn) % 2:
            order.reverse()
        works = []
        for i in order:
            matrix = (matrix @ matrix).clamp(-1, 1)
            works.append(
                dist.all_reduce(values[i], op=dist.ReduceOp.AVG, group=groups[i], async_op=True)
            )
        for work in works:
            assert work is not None
            work.wait()
    torch.cuda.synchronize()
    assert all(value.eq(1).all() for value in values)
    _assert_only_cpu_reduce()


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:deepytorch")


def _memory(rank: int, world_size: int) -> None:
    """Free groups: each unpins its memory; freed device memory waits for nothing under way."""
    device = rank_gpu(rank)
    value = torch.ones(1 << 20, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    torch.cuda.synchronize()
    before = _mappings()
    assert before > 0
    for _ in range(3):
        group = dist.new_group(list(range(world_size)))
        spare = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        work = dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group, async_op=True)
        del spare
        torch.cuda.empty_cache()
        assert work is not None
        work.wait()
        torch.cuda.synchronize()
        assert _mappings() > before
        dist.all_reduce(torch.ones(1))  # on the host: all have got that far
        dist.destroy_process_group(group)
    assert _mappings() == before
    assert value.eq(1).all()


def _killed(rank: int, world_size: int) -> tuple[str, float]:
    device = rank_gpu(rank)
    value = torch.ones(8 << 20, device=device)
    dist.all_reduce(value)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(200):
            dist.all_reduce(value)
            torch.cuda.synchronize()
            time.sleep(0.05)
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def _late(rank: int, world_size: int) -> str:
    device = rank_gpu(rank)
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=2))
    value = torch.ones(1 << 20, device=device)
    dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(6)
        return "late"
    try:
        for _ in range(100):
            dist.all_reduce(value, group=group)
            torch.cuda.synchronize()
            time.sleep(0.05)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def _mismatch(rank: int, world_size: int) -> str:
    device = rank_gpu(rank)
    dist.all_reduce(torch.ones(1 << 16, device=device))
    try:
        for _ in range(100):
            dist.all_reduce(torch.ones((1 << 16) + rank, device=device))
            torch.cuda.synchronize()
            time.sleep(0.05)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def _captured(rank: int, world_size: int) -> set[str]:
    from deepytorch_core import _core

    value = torch.ones(1 << 20, device=rank_gpu(rank))
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    dist.all_to_all_single(torch.empty_like(value), value)  # wakes NCCL, before the capture
    torch.cuda.synchronize()
    _core.reset_statistics()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(value)
    graph.replay()
    torch.cuda.synchronize()
    assert value.eq(world_size).all()
    return {f"{row['algorithm']}: {row['reason']}" for row in _core.statistics() if row["calls"]}


def _tuned(rank: int, world_size: int) -> list[dict[str, Any]]:
    from deepytorch_core import _core

    device = rank_gpu(rank)
    for count in [1 << 18, 4 << 20, 16 << 20]:
        value = torch.full((count,), float(rank + 1), device=device)
        dist.all_reduce(value)
        assert value.eq(world_size * (world_size + 1) / 2).all()
        whole = torch.empty(count * world_size, device=device)
        dist.all_gather_into_tensor(whole, torch.full((count,), float(rank), device=device))
        part = torch.empty(count, device=device)
        dist.reduce_scatter_tensor(part, whole)
        assert part.eq(rank * world_size).all()
    torch.cuda.synchronize()
    assert _core.peer_mappings() == 0
    return [dict(plan) for plan in _core.plans() if plan["device"]]


def _losses(rank: int, world_size: int, wrapper: str) -> list[float]:
    device = rank_gpu(rank)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 64))
    model = model.to(device)
    if wrapper == "ddp":
        model = DistributedDataParallel(model, device_ids=[device])
    else:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    losses = []
    for _ in range(8):
        loss = model(torch.randn(16, 512, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _native_losses(rank: int, world_size: int, wrapper: str) -> list[float]:
    from deepytorch_core import _core

    losses = _losses(rank, world_size, wrapper)
    assert "cpu_reduce" in {row["algorithm"] for row in _core.statistics() if row["calls"]}
    assert _core.peer_mappings() == 0
    return losses


@pytest.mark.parametrize("world_size", WORLDS)
def test_one_chunk(world_size: int) -> None:
    assert len(set(_spawn(_one, world_size))) == 1


@pytest.mark.parametrize("world_size", WORLDS)
def test_results(world_size: int) -> None:
    _spawn(_results, world_size, timeout_s=120.0)


@pytest.mark.parametrize("world_size", WORLDS)
def test_lists(world_size: int) -> None:
    _spawn(_lists, world_size, fresh=True)


def test_lists_in_memory_mapped_piece_by_piece() -> None:
    env = {**NATIVE, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    _spawn(_lists, 4, env=env, fresh=True)


@pytest.mark.parametrize("through_host", [True, False])
def test_a_work_that_nobody_keeps(through_host: bool) -> None:
    env = {**NATIVE, "NCCL_P2P_DISABLE": "1" if through_host else "0"}
    _spawn(_dropped, 2, through_host, env=env, fresh=True)


@pytest.mark.parametrize("nodes", ["a,b", "a,a,b,b", "a,b,a,b", "a,b,c,d"])
def test_results_between_nodes(nodes: str) -> None:
    env = {**NATIVE, "DEEPYTORCH_NODE_ID": nodes}
    num_nodes = len(set(nodes.split(",")))
    _spawn(_results, len(nodes.split(",")), num_nodes, env=env, timeout_s=120.0, fresh=True)


@pytest.mark.parametrize(("queues", "num_groups"), [(8, 2), (32, 3)])
@pytest.mark.parametrize("world_size", WORLDS)
def test_groups_in_opposite_orders(world_size: int, queues: int, num_groups: int) -> None:
    rounds = 50 if torch.cuda.device_count() >= world_size else 3
    env = {**NATIVE, "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
    _spawn(_groups, world_size, rounds, num_groups, env=env, fresh=True)


def _one_group_too_many(rank: int, world_size: int, folder: Path) -> None:
    os.dup2(os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY, 0o600), 2)
    value = torch.ones(300_000, device=rank_gpu(rank))
    for number in range(3):
        group = dist.new_group(list(range(world_size)))
        try:
            dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group)
        except dist.DistBackendError:  # NCCL's, where the ranks share one GPU
            assert number == 2
    assert value.eq(1).all()


def test_groups_beyond_the_gpus_queues_are_told(tmp_path: Path) -> None:
    env = {**NATIVE, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    _spawn(_one_group_too_many, 2, tmp_path, env=env, fresh=True)
    for rank in range(2):
        said = (tmp_path / str(rank)).read_text()
        assert "serve 2 groups of a process" in said, said
        assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in said, said


def test_memory_is_given_back() -> None:
    _spawn(_memory, 2, fresh=True)


def test_a_killed_rank_is_named() -> None:
    outcomes = _spawn(_killed, 2, expect_dead={1}, fresh=True)
    said, seconds = outcomes[0]
    assert "rank 1 (pid" in said, said
    assert "died" in said, said
    assert seconds < 10


def test_a_killed_rank_of_another_node_is_named() -> None:
    env = {**NATIVE, "DEEPYTORCH_NODE_ID": "a,b"}
    outcomes = _spawn(_killed, 2, env=env, expect_dead={1}, fresh=True)
    said, seconds = outcomes[0]
    assert "rank 1" in said, said
    assert seconds < 10


def test_a_rank_that_does_not_come_is_named() -> None:
    outcomes = _spawn(_late, 2, fresh=True)
    assert "rank 1 did not come in time" in outcomes[0], outcomes


def test_different_sizes_are_named() -> None:
    outcomes = _spawn(_mismatch, 2, fresh=True)
    assert any("another operation, or one of another size" in said for said in outcomes), outcomes


@needs_gpus(2)
def test_graphs_are_nccls() -> None:
    reasons = _spawn(_captured, 2, fresh=True)
    assert all("while a graph captures" in str(each) for each in reasons), reasons


@needs_gpus(2)
def test_the_tuner_tries_both() -> None:
    world_size = min(4, torch.cuda.device_count())
    auto = {**EMULATED, "DEEPYTORCH_TUNE": "force"}
    for plans in _spawn(_tuned, world_size, env=auto, fresh=True, timeout_s=120.0):
        assert plans
        for plan in plans:
            assert str(plan["device"]).endswith("without peer access")
            tried = {candidate["algorithm"] for candidate in plan["candidates"]}
            assert tried == {"cpu_reduce", "delegate"}, plan


@needs_gpus(2)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_losses_are_nccls(wrapper: str) -> None:
    """Two ranks' sums are the same in any order."""
    stock = _spawn(_losses, 2, wrapper, env=EMULATED, backend="nccl", fresh=True)
    ours = _spawn(_native_losses, 2, wrapper, fresh=True)
    assert ours == stock


@needs_gpus(4)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_losses_of_four_are_close_to_nccls(wrapper: str) -> None:
    stock = _spawn(_losses, 4, wrapper, env=EMULATED, backend="nccl", fresh=True)
    ours = _spawn(_native_losses, 4, wrapper, fresh=True)
    for rank in range(4):
        assert ours[rank] == pytest.approx(stock[rank], rel=1e-4)
