"""The operations of the Horovod API against references, on 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import deepytorch
import deepytorch.integrations.horovod as hvd
from deepytorch.integrations.common.horovod_common import RankPlacement
from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import spawn_ranks


def values(rank: int, shape: tuple[int, ...] = (7, 3), dtype: torch.dtype = torch.float32) -> Any:
    """Return what a rank contributes: any rank can work out any other's."""
    made = torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape) + 10 * rank + 1
    return made.to(dtype)


def native_ops() -> set[str]:
    return {row.op for row in deepytorch.report().rows if row.algorithm != "delegate"}


def who_is_who(rank: int, world_size: int) -> dict[str, Any]:
    hvd.init()
    hvd.init()  # twice is once
    assert hvd.is_initialized()
    found = {
        "rank": (hvd.rank(), hvd.size()),
        "local": (hvd.local_rank(), hvd.local_size()),
        "cross": (hvd.cross_rank(), hvd.cross_size()),
        "homogeneous": hvd.is_homogeneous(),
        "set": (hvd.global_process_set.rank(), hvd.global_process_set.size()),
    }
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert dist.is_initialized(), "it was there before init"
    return found


def test_everyone_knows_who_is_who() -> None:
    found = spawn_ranks(who_is_who, 2, backend="deepytorch")
    assert found == [
        {
            "rank": (rank, 2),
            "local": (rank, 2),
            "cross": (0, 1),
            "homogeneous": True,
            "set": (rank, 2),
        }
        for rank in range(2)
    ]


def test_placement_on_several_nodes() -> None:
    nodes = ["a", "b", "a", "b", "a"]
    found = [RankPlacement.among(rank, nodes) for rank in range(5)]
    assert [place.local_rank for place in found] == [0, 0, 1, 1, 2]
    assert [place.local_size for place in found] == [3, 2, 3, 2, 3]
    assert [place.cross_rank for place in found] == [0, 1, 0, 1, 0]
    assert [place.cross_size for place in found] == [2, 2, 2, 2, 1]
    assert not found[0].is_homogeneous


def reduce_all(rank: int, world_size: int) -> set[str]:
    hvd.init()
    both = torch.stack([values(0), values(1)])
    expected = {
        hvd.Average: both.mean(0),
        hvd.Sum: both.sum(0),
        hvd.Min: both.amin(0),
        hvd.Max: both.amax(0),
        hvd.Product: both.prod(0),
    }
    own = values(rank)
    for op, result in expected.items():
        torch.testing.assert_close(hvd.allreduce(own, op=op), result)
        handle = hvd.allreduce_async(own, name="some name", op=op)
        torch.testing.assert_close(hvd.synchronize(handle), result)
        assert hvd.poll(handle)
        torch.testing.assert_close(hvd.synchronize(handle), result)
    assert torch.equal(own, values(rank)), "not in place"
    torch.testing.assert_close(hvd.allreduce(own), expected[hvd.Average])
    with pytest.warns(DeprecationWarning, match="op=hvd.Average"):
        torch.testing.assert_close(hvd.allreduce(own, average=False), expected[hvd.Sum])
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8):
        result = hvd.allreduce(values(rank, dtype=dtype), op=hvd.Sum)
        torch.testing.assert_close(result, (values(0) + values(1)).to(dtype))
    cut = hvd.allreduce(torch.tensor([rank, -rank, 4 + rank]), op=hvd.Average)
    assert cut.tolist() == [0, 0, 4]
    scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(scaled, both.sum(0) * 1.5)
    mutable = own.clone().t()  # strided
    assert hvd.allreduce_(mutable, op=hvd.Sum) is mutable
    torch.testing.assert_close(mutable, both.sum(0).t())
    assert hvd.synchronize(hvd.allreduce_async_(mutable)) is mutable
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
        result = hvd.allreduce(own, compression=compression)
        assert result.dtype is torch.float32
        torch.testing.assert_close(result, both.mean(0), rtol=tolerance, atol=0)
    many = [values(rank, shape) for shape in ((3,), (200, 300), (5, 2), ())] + [
        torch.tensor([rank, 2])
    ]
    sums = hvd.grouped_allreduce(many, op=hvd.Sum, prescale_factor=2.0)
    for index, result in enumerate(sums):
        shape = tuple(result.shape)
        other = values(1 - rank, shape) if index < 4 else torch.tensor([1 - rank, 2])
        torch.testing.assert_close(result, 2 * (many[index] + other))
    in_place = [tensor.clone() for tensor in many]
    hvd.grouped_allreduce_(in_place, op=hvd.Max)
    assert torch.equal(in_place[1], values(1, (200, 300)))
    assert torch.equal(hvd.synchronize(hvd.grouped_allreduce_async(many))[4], torch.tensor([0, 2]))
    sparse = torch.sparse_coo_tensor([[rank, 2]], [[1.0, 2.0], [3.0, 4.0]], (4, 2))
    dense = hvd.synchronize(hvd.sparse_allreduce_async(sparse, name="s", op=hvd.Sum)).to_dense()
    assert dense.tolist() == [[1.0, 2.0], [1.0, 2.0], [6.0, 8.0], [0.0, 0.0]]
    hvd.shutdown()
    return native_ops()


def test_allreduce_in_all_its_forms() -> None:
    for ops in spawn_ranks(reduce_all, 2, backend="deepytorch"):
        assert {"all_reduce", "all_gather"} <= ops


def move(rank: int, world_size: int) -> set[str]:
    hvd.init()
    rows = hvd.allgather(values(rank, (4, 3)))
    assert torch.equal(rows, torch.cat([values(r, (4, 3)) for r in range(world_size)]))
    uneven = [values(r, (2 * r, 3)) for r in range(world_size)]
    assert torch.equal(hvd.allgather(uneven[rank]), torch.cat(uneven))
    assert torch.equal(hvd.synchronize(hvd.allgather_async(uneven[rank])), torch.cat(uneven))
    parts = hvd.grouped_allgather([values(rank, (2,)), uneven[rank].long()])
    assert torch.equal(parts[1], torch.cat(uneven).long())
    flags = hvd.allgather(torch.tensor([rank == 1]))
    assert flags.tolist() == [r == 1 for r in range(world_size)]

    for root in range(world_size):
        assert torch.equal(hvd.broadcast(values(rank), root), values(root))
    own = values(rank).t()
    assert hvd.broadcast_(own, 1, name="b") is own
    assert torch.equal(own, values(1).t())
    assert torch.equal(hvd.synchronize(hvd.broadcast_async(values(rank), 2)), values(2))

    sent = torch.arange(world_size * 2) + 100 * rank
    received = hvd.alltoall(sent)
    assert received.tolist() == [
        100 * r + 2 * rank + i for r in range(world_size) for i in range(2)
    ]
    # Rank r sends r + p rows to rank p.
    splits = torch.tensor([rank + peer for peer in range(world_size)])
    sent = torch.full((int(splits.sum()), 2), rank)
    output, counts = hvd.alltoall(sent, splits=splits)
    assert counts.tolist() == [peer + rank for peer in range(world_size)]
    assert output[:, 0].tolist() == [r for r in range(world_size) for _ in range(r + rank)]
    assert torch.equal(hvd.synchronize(hvd.alltoall_async(sent, splits))[0], output)

    total = torch.stack([values(r, (6, 2)) for r in range(world_size)])
    share = hvd.reducescatter(values(rank, (6, 2)), op=hvd.Sum)
    each = [2, 2, 2] if world_size == 3 else [3, 3]
    assert torch.equal(share, total.sum(0).split(each)[rank])
    total = torch.stack([values(r, (4, 2)) for r in range(world_size)])
    share = hvd.reducescatter(values(rank, (4, 2)), prescale_factor=2.0)
    torch.testing.assert_close(share, 2 * total.mean(0).split([2, 1, 1])[rank])
    shares = hvd.grouped_reducescatter([values(rank, (4, 2))], op=hvd.Sum, postscale_factor=0.5)
    torch.testing.assert_close(shares[0], 0.5 * total.sum(0).split([2, 1, 1])[rank])

    thing = {"rank": rank, "many": list(range(rank))}
    assert hvd.broadcast_object(thing, root_rank=2) == {"rank": 2, "many": [0, 1]}
    assert [each["rank"] for each in hvd.allgather_object(thing)] == list(range(world_size))
    hvd.shutdown()
    return native_ops()


def test_moving_operations_with_even_and_uneven_parts() -> None:
    for ops in spawn_ranks(move, 3, backend="deepytorch"):
        assert {"all_gather", "broadcast", "all_to_all", "reduce_scatter"} <= ops


def differentiate(rank: int, world_size: int) -> None:
    hvd.init()
    weight = torch.full((3, 2), float(rank + 1))

    def gradient_of(function: Any, shape: tuple[int, ...] = (3, 2)) -> torch.Tensor:
        leaf = torch.ones(shape, requires_grad=True)
        result = function(leaf)
        (result * (rank + 1.0)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    ones = torch.ones(3, 2)
    # Horovod's conventions: a reduction's gradient is reduced alike, a movement's is averaged.
    assert torch.equal(gradient_of(lambda x: hvd.allreduce(x, op=hvd.Sum)), 3 * ones)
    assert torch.equal(gradient_of(hvd.allreduce), 1.5 * ones)
    scaled = gradient_of(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0))
    assert torch.equal(scaled, 6 * ones)
    grouped = gradient_of(lambda x: sum(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)))
    assert torch.equal(grouped, 9 * ones)
    assert torch.equal(gradient_of(hvd.allgather), 1.5 * ones)
    shape = (1 + rank, 2)
    assert torch.equal(gradient_of(hvd.allgather, shape), 1.5 * torch.ones(shape))
    expected = 1.5 * ones if rank == 1 else 0 * ones
    assert torch.equal(gradient_of(lambda x: hvd.broadcast(x, 1)), expected)
    exchanged = gradient_of(lambda x: hvd.alltoall(x, splits=[1, 2])[0])
    assert exchanged.tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    scattered = gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum))
    assert scattered.tolist() == [[2.0, 2.0], [2.0, 2.0], [4.0, 4.0]]
    averaged = gradient_of(hvd.reducescatter)
    assert averaged.tolist() == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]
    compressed = gradient_of(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16))
    assert torch.equal(compressed, 1.5 * ones)
    assert not hvd.allreduce(weight).requires_grad
    hvd.shutdown()


def test_gradients_are_horovods() -> None:
    spawn_ranks(differentiate, 2, backend="deepytorch")


def in_sets(rank: int, world_size: int) -> None:
    first = hvd.ProcessSet([2, 0])
    assert first.size() is None
    hvd.init(process_sets=[first])
    second = hvd.add_process_set([1, 2, 3])
    assert (first.ranks, first.process_set_id is not None) == ([0, 2], True)
    assert first.included() == (rank in (0, 2))
    assert first.rank() == {0: 0, 2: 1}.get(rank, -1)
    if rank in (0, 2):
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=first).tolist() == [2]
        assert hvd.broadcast(torch.tensor([rank]), 2, process_set=first).tolist() == [2]
        assert hvd.allgather_object(rank, process_set=first) == [0, 2]
        hvd.barrier(first)
        with pytest.raises(ValueError, match="root_rank 1 is not in ProcessSet"):
            hvd.broadcast(torch.tensor([rank]), 1, process_set=first)
    else:
        with pytest.raises(ValueError, match=f"does not include this process, rank {rank}"):
            hvd.allreduce(torch.tensor([rank]), process_set=first)
    if rank != 0:
        rows = hvd.allgather(torch.full((rank,), rank), process_set=second)
        assert rows.tolist() == [1, 2, 2, 3, 3, 3]
    with pytest.raises(ValueError, match="duplicate process set"):
        hvd.add_process_set([3, 2, 1])
    with pytest.raises(ValueError, match="from 0 to 3"):
        hvd.add_process_set([3, 4])
    assert hvd.remove_process_set(second)
    assert not hvd.remove_process_set(second)
    assert not hvd.remove_process_set(hvd.global_process_set)
    hvd.shutdown()
    assert first.size() is None


def test_process_sets() -> None:
    spawn_ranks(in_sets, 4, backend="deepytorch")


def normalise(rank: int, world_size: int) -> None:
    hvd.init()
    torch.manual_seed(1)
    everything = torch.randn(10, 3, 4, dtype=torch.float64)
    weights = torch.randn(10, 3, 4, dtype=torch.float64)
    mine = slice(0, 4) if rank == 0 else slice(4, 10)
    plain = torch.nn.BatchNorm1d(3).double()
    ours = hvd.SyncBatchNorm(3).double()
    for _ in range(2):
        whole, part = everything.clone().requires_grad_(), everything[mine].clone().requires_grad_()
        expected, found = plain(whole), ours(part)
        torch.testing.assert_close(found, expected[mine])
        (expected * weights).sum().backward()
        (found * weights[mine]).sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, whole.grad[mine])
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], buffer)
    plain.eval(), ours.eval()
    torch.testing.assert_close(ours(everything), plain(everything))
    hvd.shutdown()


def test_batch_norm_over_all_ranks_is_that_of_the_whole_batch() -> None:
    spawn_ranks(normalise, 2, backend="deepytorch")


def test_one_process_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    try:
        assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (0, 1, 0)
        assert hvd.allreduce(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
        assert hvd.alltoall(torch.arange(2), splits=[2])[1].tolist() == [2]
        assert hvd.join() == 0
    finally:
        hvd.shutdown()
    assert not dist.is_initialized()


def test_what_it_says_of_its_build() -> None:
    assert not hvd.mpi_built()
    assert not hvd.mpi_enabled()
    assert not hvd.mpi_threads_supported()
    assert hvd.gloo_built() == hvd.gloo_enabled() == dist.is_gloo_available()
    assert (hvd.nccl_built() > 0) == dist.is_nccl_available()
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()


def on_stock(rank: int, world_size: int) -> str:
    hvd.init()
    assert torch.equal(hvd.allreduce(values(rank)), (values(0) + values(1)) / 2)
    uneven = [values(r, (2 * r + 1, 3)) for r in range(world_size)]
    assert torch.equal(hvd.allgather(uneven[rank]), torch.cat(uneven))
    torch.testing.assert_close(
        hvd.reducescatter(values(rank, (3, 2))),
        ((values(0, (3, 2)) + values(1, (3, 2))) / 2).split([2, 1])[rank],
    )
    assert hvd.alltoall(torch.arange(3), splits=[1, 2])[1].tolist() == [1 + rank] * 2
    name = serving_name()
    hvd.shutdown()
    return name


def test_switched_off_it_runs_on_the_stock_backend() -> None:
    env = {"DEEPYTORCH_ENABLED": "0"}
    assert spawn_ranks(on_stock, 2, backend="gloo", fresh=True, env=env) == ["gloo"] * 2
