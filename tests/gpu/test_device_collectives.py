"""Native collectives on GPUs against float64: operations, types, alignments, graphs, streams.

With fewer GPUs than ranks the ranks share them, which NCCL does not do: so nothing here is
delegated unless a test says so.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.testing import needs_gpus, spawn_ranks
from deepytorch_core.testing.tensors import assert_close, rank_gpu, rank_inputs, reduced, shifted

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

NATIVE = {
    "DEEPYTORCH_COLLECTIVES": "native",
    "DEEPYTORCH_TUNE": "off",
    "DEEPYTORCH_ERROR_HANDLING": "raise",
}
WORLDS = [2, 4]
# In elements: one, odd ones, around what goes in lines, large with and without a remainder.
COUNTS = [1, 3, 127, 1024, 4099, 70_001, 1 << 20, (5 << 20) + 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


def _assert_all_native() -> None:
    from deepytorch_core import _core

    rows = [row for row in _core.statistics() if row["calls"]]
    assert rows
    assert {str(row["algorithm"]) for row in rows} <= {
        "low_latency",
        "packet",
        "two_shot",
        "push",
        "ring",
    }, rows


def _reductions(rank: int, world_size: int) -> None:
    from deepytorch_core import _core

    device = rank_gpu(rank)
    _core.reset_statistics()
    for dtype in DTYPES:
        for shift, count in enumerate(COUNTS):
            for name in ["sum", "avg"] if count > 5000 else OPS:
                what = f"{name} of {count} x {dtype} on rank {rank}"
                inputs = rank_inputs(count, world_size, dtype, device)
                value = shifted(inputs[rank], shift % 5)
                dist.all_reduce(value, op=OPS[name])
                assert_close(value, reduced(inputs, name), f"all_reduce {what}")

                whole = rank_inputs(count * world_size, world_size, dtype, device)
                part = torch.empty(count, dtype=dtype, device=device)
                dist.reduce_scatter_tensor(part, shifted(whole[rank], shift % 3), op=OPS[name])
                own = reduced(whole, name)[rank * count : (rank + 1) * count]
                assert_close(part, own, f"reduce_scatter {what}")
    torch.cuda.synchronize()
    _assert_all_native()


def _small_types(rank: int, world_size: int) -> None:
    device = rank_gpu(rank)
    for dtype in [torch.float64, torch.int32, torch.int64]:
        for op in [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX]:
            generator = torch.Generator().manual_seed(3)
            inputs = [
                torch.randint(-99, 99, (701,), generator=generator).to(dtype)
                for _ in range(world_size)
            ]
            value = inputs[rank].to(device)
            dist.all_reduce(value, op=op)
            stacked = torch.stack(inputs)
            expected = {
                dist.ReduceOp.SUM: stacked.sum(0),
                dist.ReduceOp.MIN: stacked.amin(0),
                dist.ReduceOp.MAX: stacked.amax(0),
            }[op]
            assert torch.equal(value.cpu(), expected.to(dtype))
    _assert_all_native()


def _exchanges(rank: int, world_size: int) -> None:
    device = rank_gpu(rank)
    for count in COUNTS:
        inputs = rank_inputs(count, world_size, torch.bfloat16, device)
        gathered = torch.empty(count * world_size, dtype=torch.bfloat16, device=device)
        dist.all_gather_into_tensor(gathered, inputs[rank])
        assert torch.equal(gathered, torch.cat(inputs)), f"all_gather of {count}"

        sent = rank_inputs(count * world_size, world_size, torch.bfloat16, device)
        received = torch.empty_like(sent[0])
        dist.all_to_all_single(received, sent[rank])
        part = slice(rank * count, (rank + 1) * count)
        assert torch.equal(received, torch.cat([each[part] for each in sent])), count
        # Rows that lie apart, each in one piece.
        apart = torch.zeros(world_size, count + 8, dtype=torch.bfloat16, device=device)[:, :count]
        dist.all_to_all_single(apart, sent[rank].view(world_size, count))
        assert torch.equal(apart.flatten(), received), f"strided, {count}"

        root = count % world_size
        value = inputs[rank].clone()
        dist.broadcast(value, root)
        assert torch.equal(value, inputs[root]), f"broadcast of {count}"
    # Each rank gives peer p a number of rows of its own.
    rows = [[(3 * sender + 5 * receiver) % 7 * 1000 for receiver in range(world_size)]
            for sender in range(world_size)]  # fmt: skip
    sent_rows = rows[rank]
    received_rows = [rows[sender][rank] for sender in range(world_size)]
    source = torch.full((sum(sent_rows), 3), float(rank), device=device)
    target = torch.empty((sum(received_rows), 3), device=device)
    dist.all_to_all_single(target, source, received_rows, sent_rows)
    expected = torch.cat(
        [torch.full((count, 3), float(sender)) for sender, count in enumerate(received_rows)]
    )
    assert torch.equal(target.cpu(), expected)
    parts = [torch.empty(100 + peer, device=device) for peer in range(world_size)]
    dist.all_gather(parts, torch.full((100 + rank,), float(rank), device=device))
    assert all(part.eq(peer).all() for peer, part in enumerate(parts))
    torch.cuda.synchronize()
    _assert_all_native()


def _lists_that_differ(rank: int, world_size: int) -> None:
    """Columns of a tensor on rank 0, which is also the root, and tensors in one piece elsewhere."""
    device = rank_gpu(rank)

    def of(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        together = torch.stack(inputs, 1 if rank == 0 else 0)
        return list(together.unbind(1 if rank == 0 else 0))

    for count in (5, 4099, 300_000):
        inputs = rank_inputs(count, world_size, torch.float32, device)
        mine = inputs[rank]
        for asynchronous in (False, True):

            def run(call: Any, *arguments: Any, on: bool = asynchronous) -> None:
                work = call(*arguments, async_op=on)
                if work is not None:
                    work.wait()

            what = f"{count}, async {asynchronous}, rank {rank}"
            nothing = [torch.zeros_like(mine) for _ in inputs]
            places = of(nothing)
            before = [place._version for place in places]
            run(dist.all_gather, places, mine)
            assert all(map(torch.equal, places, inputs)), f"all_gather {what}"
            heard = [place._version - then for place, then in zip(places, before, strict=True)]
            assert all(heard), f"all_gather {what}: autograd does not hear of it, as of NCCL's"
            places = of(nothing)
            run(dist.all_to_all, places, of([mine + peer for peer in range(world_size)]))
            exact = [each + rank for each in inputs]
            assert all(map(torch.equal, places, exact)), f"all_to_all {what}"
            share = torch.empty_like(mine)
            run(dist.reduce_scatter, share, of(inputs))
            assert_close(share, mine.double() * world_size, f"reduce_scatter {what}")
            places = of(nothing)
            run(dist.gather, mine, places if rank == 0 else None)
            assert rank or all(map(torch.equal, places, inputs)), f"gather {what}"
            run(dist.scatter, share, of(inputs) if rank == 0 else None)
            assert torch.equal(share, mine), f"scatter {what}"
    torch.cuda.synchronize()
    _assert_all_native()


def _same_bits(rank: int, world_size: int) -> list[int]:
    device = rank_gpu(rank)
    sums = []
    for count in [1000, 3_000_001]:
        for _ in range(3):
            value = rank_inputs(count, world_size, torch.bfloat16, device)[rank]
            dist.all_reduce(value)
            sums.append(int(value.view(torch.int16).long().sum()))
    return sums


def _graphs(rank: int, world_size: int, replays: int) -> None:
    device = rank_gpu(rank)
    small = torch.ones(1000, device=device)
    large = torch.ones(1 << 20, device=device)
    dist.all_reduce(small)  # what capture needs exists from here on
    graphs = []
    for value in [small, large]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(value, op=dist.ReduceOp.AVG)
            work = dist.all_reduce(value, op=dist.ReduceOp.AVG, async_op=True)
            assert work is not None
            work.wait()
        graphs.append(graph)
    eager = torch.ones(5000, device=device)
    for turn in range(replays):
        small.fill_(turn + rank)
        large.fill_(turn + rank)
        graphs[turn % 2].replay()
        graphs[1 - turn % 2].replay()
        dist.all_reduce(eager, op=dist.ReduceOp.AVG)
        if turn % 100 == 0:
            mean = turn + (world_size - 1) / 2
            torch.testing.assert_close(small, torch.full_like(small, mean))
            torch.testing.assert_close(large, torch.full_like(large, mean))
    assert eager.eq(1).all()


def _many_groups(rank: int, world_size: int, rounds: int) -> None:
    """Groups on streams of their own, issued in opposite orders, beside matrix products."""
    device = rank_gpu(rank)
    groups = [dist.new_group(list(range(world_size))) for _ in range(10)]
    values = [torch.ones(4000 * (i + 1), device=device) for i in range(len(groups))]
    for group, value in zip(groups, values, strict=True):
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group)
    matrix = torch.randn(2048, 2048, device=device)
    for turn in range(rounds):
        order = list(range(len(groups)))
        if (rank + turn) % 2:
            order.reverse()
        works = []
        for i in order:
            matrix = (matrix @ matrix).clamp(-1, 1)
            work = dist.all_reduce(values[i], op=dist.ReduceOp.AVG, group=groups[i], async_op=True)
            works.append(work)
        for work in works:
            assert work is not None
            work.wait()
    torch.cuda.synchronize()
    assert all(value.eq(1).all() for value in values)


def _mixed_sizes(rank: int, world_size: int, other: int) -> str:
    device = rank_gpu(rank)
    dist.all_reduce(torch.ones(8, device=device))
    value = torch.ones(other if rank == 1 else 8, device=device)
    try:
        for _ in range(50):
            dist.all_reduce(value)
            torch.cuda.synchronize()
            time.sleep(0.1)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def _late_rank(rank: int, world_size: int) -> str:
    from datetime import timedelta

    device = rank_gpu(rank)
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=2))
    value = torch.ones(8, device=device)
    dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(8)
        return "late"
    try:
        for _ in range(80):
            dist.all_reduce(value, group=group)
            torch.cuda.synchronize()
            time.sleep(0.1)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def _saves_what_it_got(rank: int, world_size: int, file: str) -> None:
    from datetime import timedelta

    device = rank_gpu(rank)
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=2))
    value = torch.ones(8, device=device)
    dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(12)
        return
    dist.all_reduce(value, group=group)
    Path(file).write_text(str(value.sum().item()))


def _spawn(function: Any, world_size: int, *arguments: Any, **more: Any) -> list[Any]:
    settings = {"env": NATIVE, **more}
    return spawn_ranks(
        function, world_size, *arguments, backend="cuda:deepytorch,cpu:deepytorch", **settings
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("what", [_reductions, _small_types, _exchanges, _lists_that_differ])
def test_results(what: Any, world_size: int) -> None:
    _spawn(what, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_ranks_get_the_same_bits_every_time(world_size: int) -> None:
    sums = _spawn(_same_bits, world_size)
    assert all(rank == sums[0] for rank in sums)
    assert sums[0][:3] == [sums[0][0]] * 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLDS)
def test_graphs_and_eager_calls_mix(world_size: int) -> None:
    alone = torch.cuda.device_count() >= world_size
    _spawn(_graphs, world_size, 1000 if alone else 50)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLDS)
def test_groups_in_opposite_orders(world_size: int) -> None:
    alone = torch.cuda.device_count() >= world_size
    _spawn(_many_groups, world_size, 200 if alone else 5)


# The larger ones go by other kernels, so neither rank gets what it waits for.
@pytest.mark.parametrize("other", [16, 1 << 16, 1 << 22])
def test_different_sizes_are_named(other: int) -> None:
    outcomes = _spawn(_mixed_sizes, 2, other)
    assert any("another operation, or one of another size" in said for said in outcomes), outcomes


def test_a_rank_that_does_not_come_is_named() -> None:
    outcomes = _spawn(_late_rank, 2)
    assert "rank 1 did not come in time" in outcomes[0], outcomes


def test_after_a_failure_the_process_ends_before_it_can_save_anything(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    by_default = {**NATIVE, "DEEPYTORCH_ERROR_HANDLING": "abort"}
    _spawn(_saves_what_it_got, 2, str(file), env=by_default, expect_dead={0}, fresh=True)
    assert not file.exists()
