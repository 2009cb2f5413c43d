"""Parts of torch that choose by a backend's name or class, over groups rewritten to ours.

Each is compared with the same on stock gloo, or with what it has to compute. The list of all such
places is docs/backend-sites.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn import functional as torch_dist_nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, IterDataPipe

from deepytorch_core.c10d import activation
from deepytorch_core.c10d import patches as c10d_patches
from deepytorch_core.testing import rank_store, spawn_ranks

TIMEOUT = timedelta(seconds=40)
# Neither says what types its functions take.
dcp: Any = torch_checkpoint
dist_nn: Any = torch_dist_nn


def init(rank: int, world_size: int, backend: str = "gloo") -> None:
    activation.activate()
    store = rank_store(f"world {backend}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    assert c10d_patches.serving_name() == "deepytorch"


def on_ours_and_on_stock(body: Any, world_size: int = 2, **kwargs: Any) -> list[Any]:
    """Results of `body(rank, world_size)` on ours, checked to equal those on stock gloo."""
    ours = spawn_ranks(run_body, world_size, body, stock=False, **kwargs)
    stock = spawn_ranks(run_body, world_size, body, stock=True, **kwargs)
    assert ours == stock
    return ours


def run_body(rank: int, world_size: int, body: Any, *, stock: bool, **kwargs: Any) -> Any:
    if stock:
        dist.init_process_group(
            "gloo", store=rank_store("stock"), rank=rank, world_size=world_size, timeout=TIMEOUT
        )
    else:
        init(rank, world_size)
    return body(rank, world_size, **kwargs)


def all_gather_gradient(rank: int, world_size: int) -> list[Any]:
    value = torch.full((2, 3), float(rank + 1), requires_grad=True)
    # torch binds the default of `group` when the module is imported, which may be long ago here.
    parts = dist_nn.all_gather(value, dist.group.WORLD)
    sum((index + 1) * part.square().sum() for index, part in enumerate(parts)).backward()
    assert value.grad is not None
    return [torch.stack(parts).tolist(), value.grad.tolist()]


def test_dist_nn_all_gather_and_its_gradient() -> None:
    found = on_ours_and_on_stock(all_gather_gradient)
    # Every rank's loss holds every part: the gradient is summed over ranks.
    assert found[1][1] == [[2 * 2 * 2 * 2.0] * 3] * 2


def all_to_all_gradient(rank: int, world_size: int) -> list[Any]:
    inputs = [torch.full((3, 2), 10.0 * rank + peer) for peer in range(world_size)]
    for tensor in inputs:
        tensor.requires_grad_()
    outputs = [torch.empty(3, 2) for _ in range(world_size)]
    received = dist_nn.all_to_all(outputs, inputs, dist.group.WORLD)
    sum((rank + 2) * tensor.sum() for tensor in received).backward()
    gradients = [tensor.grad.tolist() for tensor in inputs if tensor.grad is not None]
    return [[tensor.tolist() for tensor in received], gradients]


def test_dist_nn_all_to_all_of_lists_and_its_gradient() -> None:
    on_ours_and_on_stock(all_to_all_gradient, 3)


def all_gather_base_gradient(rank: int, world_size: int) -> list[Any]:
    init(rank, world_size, "deepytorch")
    value = torch.full((2, 3), float(rank + 1), requires_grad=True)
    whole = torch.empty(2 * world_size, 3)
    gathered = dist_nn._all_gather_base(whole, value, dist.group.WORLD)
    (gathered * torch.arange(1.0, 2 * world_size + 1)[:, None]).sum().backward()
    assert value.grad is not None
    return value.grad.tolist()


def test_dist_nn_all_gather_base_has_a_gradient() -> None:
    # Stock torch has it for NCCL only, which may stand behind our own name.
    found = spawn_ranks(all_gather_base_gradient, 2)
    assert found == [[[2.0] * 3, [4.0] * 3], [[6.0] * 3, [8.0] * 3]]


def other_dist_nn(rank: int, world_size: int) -> list[Any]:
    results = []
    world = dist.group.WORLD
    functions: tuple[Any, ...] = (
        lambda x: dist_nn.all_reduce(x, group=world),
        lambda x: dist_nn.broadcast(x, 1, world),
    )
    for function in functions:
        value = torch.full((3,), float(rank + 1), requires_grad=True)
        result = function(value.clone())
        (result * (rank + 1)).sum().backward()
        assert value.grad is not None
        results.append([result.tolist(), value.grad.tolist()])
    return results


def test_dist_nn_all_reduce_and_broadcast() -> None:
    on_ours_and_on_stock(other_dist_nn)


def waits_in_callbacks(rank: int, world_size: int) -> list[list[float]]:
    """Losses with PowerSGD, whose hook waits for a collective in the callback of another."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    )
    state: Any = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, random_seed=5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    both = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    again = both.then(lambda done: dist.all_reduce(done.value()[0], async_op=True).wait())
    return [losses, [float(again.wait())]]


def test_a_callback_may_wait_for_another_collective() -> None:
    on_ours_and_on_stock(waits_in_callbacks)


def monitored_barriers(rank: int, world_size: int) -> str:
    init(rank, world_size)
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    if rank == 1:
        return "absent"
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.3))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_monitored_barrier_names_the_absent_rank() -> None:
    found = spawn_ranks(monitored_barriers, 2, fresh=True)
    assert "Rank 1 failed to pass monitoredBarrier" in found[0]


def first_monitored_barrier(rank: int, world_size: int) -> str:
    init(rank, world_size)
    if rank == 1:
        rank_store("told").wait(["by rank 0"])
        return "absent"
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.3))
    except RuntimeError as error:
        rank_store("told").set("by rank 0", "")
        return str(error)
    return "no error"


def test_the_first_monitored_barrier_waits_no_longer_than_it_is_told() -> None:
    found = spawn_ranks(first_monitored_barrier, 2, fresh=True)
    assert "rank(s) 1 did not join within 0.3 s" in found[0]


def set_timeout(rank: int, world_size: int) -> str:
    init(rank, world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's "only supported for either nccl or gloo"
        c10d._set_pg_timeout(timedelta(seconds=0.5))
        group = dist.new_group(backend="gloo")
        c10d._set_pg_timeout(timedelta(seconds=30), group)
    if rank == 1:
        dist.barrier(group)
        return ""
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        dist.barrier(group)
        return str(error)
    return "no error"


def test_set_pg_timeout_reaches_our_backend() -> None:
    found = spawn_ranks(set_timeout, 2, fresh=True)
    assert "all_reduce" in found[0]
    assert "rank(s) 1" in found[0]


def set_timeout_after_the_upgrade(rank: int, world_size: int) -> list[float]:
    """Use a stock backend that is older than ours only after the time limit is set."""
    dist.init_process_group(
        "cpu:gloo",
        store=rank_store("world"),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )
    stock: Any = c10d._get_default_group()._get_backend(torch.device("cpu"))
    activation.activate()
    assert c10d_patches.serving_name() == "deepytorch"
    c10d._set_pg_timeout(timedelta(seconds=30))
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (3,))
    dist.all_reduce(sparse)
    return [*sparse.to_dense().tolist(), stock.options._timeout.total_seconds()]


def test_set_pg_timeout_reaches_a_stock_backend_that_was_there() -> None:
    assert spawn_ranks(set_timeout_after_the_upgrade, 2, fresh=True)[0] == [1, 1, 0, 30]


def split(rank: int, world_size: int) -> list[Any]:
    init(rank, world_size)
    half = dist.split_group(split_ranks=[[0, 1], [2]], group_desc="half")
    if rank == 3:
        return [half]
    assert half is not None
    value = torch.ones(1)
    dist.all_reduce(value, group=half)
    return [
        value.item(),
        c10d_patches.served(c10d, half),
        half.group_desc,
        dist.get_process_group_ranks(half),
    ]


def test_split_group_makes_the_groups() -> None:
    # A DeviceMesh takes this road when the default group has a device_id.
    found = spawn_ranks(split, 4)
    assert found == [
        [2, {"cpu": "deepytorch"}, "half", [0, 1]],
        [2, {"cpu": "deepytorch"}, "half", [0, 1]],
        [1, {"cpu": "deepytorch"}, "half", [2]],
        [None],
    ]


def split_twice(rank: int, world_size: int) -> list[Any]:
    """Ranks that belong to different numbers of groups before."""
    init(rank, world_size)
    dist.new_group([0, 1, 2])
    found: list[Any] = []
    for _ in range(2):
        half = dist.split_group(split_ranks=[[0, 1], [3, 2]])
        assert half is not None
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=half)
        found += [value.item(), half.group_name]
        timeout = half._get_backend(torch.device("cpu")).options._timeout
        assert timeout == c10d.default_pg_timeout  # as torch's own, whatever the parent's
    return found


def test_split_group_meets_whatever_groups_there_were() -> None:
    found = spawn_ranks(split_twice, 4, timeout_s=30)
    assert [sums[0::2] for sums in found] == [[1, 1], [1, 1], [5, 5], [5, 5]]
    names = [sums[1::2] for sums in found]
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert len({*names[0], *names[2]}) == 4


def object_collectives(rank: int, world_size: int) -> list[Any]:
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (rank * 1000)})
    shared = [("from", rank), None] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    received: list[Any] = [None]
    dist.scatter_object_list(received, [f"for {peer}" for peer in range(world_size)], src=0)
    at_root: list[Any] | None = [None] * world_size if rank == 1 else None
    dist.gather_object((rank, "mine"), at_root, dst=1)
    return [gathered, shared, received, at_root]


def test_object_collectives() -> None:
    on_ours_and_on_stock(object_collectives, 3)


def batches(rank: int, world_size: int) -> list[Any]:
    right, left = (rank + 1) % world_size, (rank - 1) % world_size

    def exchange(tag: int) -> list[Any]:
        mine, theirs = torch.full((4,), float(rank + tag)), torch.empty(4)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, right, tag=tag),
                dist.P2POp(dist.irecv, theirs, left, tag=tag),
            ]
        )
        for work in works:
            work.wait()
        return [len(works), theirs.tolist()]

    with ThreadPoolExecutor(4) as threads:
        exchanged = list(threads.map(exchange, range(40)))
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(RuntimeError):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, sparse, right)])
    after = torch.ones(2)
    dist.all_reduce(after)
    return [exchanged, after.tolist()]


def test_batches_of_sends_and_receives() -> None:
    on_ours_and_on_stock(batches, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="batches of CUDA tensors are one call there")
def test_batches_of_a_group_that_was_asked_for_as_ours() -> None:
    """No part of torch is replaced for it."""
    spawn_ranks(batches, 2, backend="deepytorch")


def device_questions(rank: int, world_size: int) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device = c10d._get_pg_default_device()
    return [
        str(device),
        c10d._get_object_coll_device(),
        sorted(c10d._device_capability()),
        c10d._get_process_group_uid(c10d._get_default_group()),
        dist.get_default_backend_for_device("cpu"),
        c10d._get_default_group()._get_backend_name(),
    ]


def test_questions_about_devices_have_the_answers_of_a_cpu_group() -> None:
    assert on_ours_and_on_stock(device_questions)[0][0] == "cpu"


def tensors_on_a_mesh(rank: int, world_size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    tensor = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    product = tensor @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate(), Replicate()])
    assert isinstance(product, DTensor)
    partial = DTensor.from_local(torch.full((2,), float(rank)), mesh["shard"], [Partial()])
    moved = tensor.redistribute(mesh, [Replicate(), Shard(1)])
    flat = mesh._flatten("everyone")
    return [
        product.full_tensor().sum().item(),
        partial.full_tensor().tolist(),
        moved.to_local().tolist(),
        dist.get_world_size(flat.get_group()),
    ]


def test_dtensor_and_a_mesh_of_two_dimensions() -> None:
    on_ours_and_on_stock(tensors_on_a_mesh, 4)


def mesh_is_ours(rank: int, world_size: int) -> list[str]:
    init(rank, world_size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = [mesh.get_group(name) for name in ("replicate", "shard")]
    return [c10d_patches.serving_name(group) for group in groups]


def test_the_groups_of_a_mesh_are_ours() -> None:
    assert spawn_ranks(mesh_is_ours, 4)[3] == ["deepytorch", "deepytorch"]


def checkpoint(rank: int, world_size: int, folder: str, *, own_group: bool) -> list[float]:
    init(rank, world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(12.0).reshape(4, 3)
    state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "step": torch.tensor(7)}
    # torch advises a gloo group of its own for the thread that writes in the background.
    group = dist.new_group(backend="gloo") if own_group else None
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    dist.all_reduce(torch.ones(1000), group=dist.new_group())  # training goes on meanwhile
    saving.result()
    fresh = {
        "sharded": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]),
        "step": torch.tensor(0),
    }
    dcp.load(fresh, checkpoint_id=folder)
    loaded = fresh["sharded"]
    assert isinstance(loaded, DTensor)
    assert torch.equal(loaded.full_tensor(), whole)
    return [fresh["step"].item(), loaded.full_tensor().sum().item()]


@pytest.mark.parametrize("own_group", [True, False])
def test_asynchronous_checkpoint(tmp_path: Path, own_group: bool) -> None:
    found = spawn_ranks(checkpoint, 2, str(tmp_path / "checkpoint"), own_group=own_group)
    assert found == [[7, 66.0]] * 2


def sharded_tensor(rank: int, world_size: int) -> list[Any]:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(0, [f"rank:{peer}/cpu" for peer in range(world_size)])
    tensor = sharded_tensor.full(spec, (4, 2), 3.0)
    out = torch.zeros(4, 2) if rank == 0 else None
    tensor.gather(dst=0, out=out)
    return [str(tensor.device), None if out is None else out.tolist()]


def test_sharded_tensor_prefers_the_right_device() -> None:
    on_ours_and_on_stock(sharded_tensor)


class Numbers(IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def numbers_from_a_loader(rank: int, world_size: int) -> list[int]:
    # For a pipe the loader makes a group of gloo and shares a seed over it.
    return [int(batch) for batch in DataLoader(Numbers(), batch_size=None)]


@pytest.mark.filterwarnings("ignore")
def test_data_loaders_group_of_their_own() -> None:
    on_ours_and_on_stock(numbers_from_a_loader)


def zero_redundancy(rank: int, world_size: int) -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(3):
        loss = model(torch.full((2, 4), float(rank + step))).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [round(value, 4) for value in model.module.weight.flatten().tolist()]


def test_zero_redundancy_optimizer() -> None:
    on_ours_and_on_stock(zero_redundancy)


def overlapped_zero(rank: int, world_size: int) -> list[str]:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    said = []
    for make in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        with pytest.raises(RuntimeError) as refused:
            make(default_hooks.allreduce_hook, model, optimizer)
        # Stock refuses it, too: our message says so.
        own_name = dist.get_backend() == "deepytorch"
        assert ("refuses it with gloo" if own_name else "Gloo") in str(refused.value)
        said.append(type(refused.value).__name__)
    return said


def overlapped_zero_by_name(rank: int, world_size: int) -> list[str]:
    init(rank, world_size, "deepytorch")
    return overlapped_zero(rank, world_size)


def test_overlapped_zero_is_refused_on_the_host() -> None:
    on_ours_and_on_stock(overlapped_zero)
    assert spawn_ranks(overlapped_zero_by_name, 2)[0] == ["RuntimeError"] * 2


def profiled(rank: int, world_size: int, backend: str) -> list[Any]:
    init(rank, world_size, backend)
    with torch.profiler.profile(record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(4, 2))
        dist.all_gather_into_tensor(torch.ones(world_size * 4, 2), torch.ones(4, 2))
    information = profiler._get_distributed_info()
    shapes = {
        event.key: event.input_shapes
        for event in profiler.key_averages(group_by_input_shape=True)
        if event.key.startswith(f"{backend}:")
    }
    return [information["backend"], information["world_size"], information["pg_count"], shapes]


@pytest.mark.parametrize("backend", ["gloo", "deepytorch"])
def test_profiler_describes_the_job(backend: str) -> None:
    shapes = {f"{backend}:all_reduce": [[4, 2]], f"{backend}:all_gather": [[4, 2]]}
    assert spawn_ranks(profiled, 2, backend)[0] == [backend, 2, 1, shapes]


def debug_wrapper(rank: int, world_size: int) -> list[Any]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # or torch would read it when it is imported
    init(rank, world_size)
    value = torch.ones(2)
    dist.all_reduce(value)
    wrapper = c10d._get_default_group()._get_backend(torch.device("cpu"))
    return [value[0].item(), type(wrapper).__name__]


def test_torchs_detailed_debugging_wraps_ours() -> None:
    found = spawn_ranks(debug_wrapper, 2, fresh=True)
    assert found[0] == [2.0, "_ProcessGroupWrapper"]


def rpc_makes_its_own_group(rank: int, world_size: int) -> list[Any]:
    from torch.distributed.rpc import backend_registry

    init(rank, world_size)
    make: Any = backend_registry._init_process_group
    group = make(rank_store("rpc"), rank, world_size)
    return [type(group).__name__, c10d_patches.serving_name()]


def test_rpc_keeps_to_gloo() -> None:
    found = spawn_ranks(rpc_makes_its_own_group, 2)
    assert found[0] == ["ProcessGroupGloo", "deepytorch"]


def aborted(rank: int, world_size: int) -> bool:
    init(rank, world_size)
    dist.all_reduce(torch.ones(1))
    c10d._abort_process_group()
    return dist.is_initialized()


def test_abort_process_group() -> None:
    assert spawn_ranks(aborted, 2, fresh=True) == [False, False]
