"""Every c10d call of backend "deepytorch" gives what gloo gives, on odd sizes and layouts.

A case is a function of a group. It runs on the group under test and on a gloo group of the same
ranks, from the same seed. Where gloo has no such call, `REFERENCES` says what is right.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import spawn_ranks

Group = dist.ProcessGroup
Case = Callable[[Group, int, int], Any]

# Nothing, a scalar's worth, odd, and past every threshold and chunk of the native algorithms.
SIZES = [0, 1, 7, 1023, 70001]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, so that sums don't depend on their order."""
    return torch.randint(-4, 5, shape).to(dtype)


def layouts(size: int) -> list[torch.Tensor]:
    """The same elements contiguous, off alignment, strided and transposed."""
    shifted = values(size + 1)[1:]
    strided = values(size, 2)[:, 0]
    transposed = values(3, size).t()
    return [values(size), shifted, strided, transposed]


def as_served(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Gloo reads and writes a strided tensor as if it were dense, so it gets a dense copy."""
    return tensor.contiguous() if serving_name(group) == "gloo" else tensor


def all_reduce(group: Group, rank: int, size: int) -> Any:
    tensors = [as_served(tensor, group) for count in SIZES for tensor in layouts(count)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return tensors


def all_reduce_of_a_scalar(group: Group, rank: int, size: int) -> Any:
    tensor = torch.tensor(float(rank))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor


def all_reduce_coalesced(group: Group, rank: int, size: int) -> Any:
    tensors = [values(7), values(4, 5), values(0), values(70001)]
    with pytest.warns(FutureWarning):
        dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def all_reduce_of_lists_that_share_memory(group: Group, rank: int, size: int) -> Any:
    """Gloo reduces a list as one message, so what is in it twice is reduced once."""
    twice, rows, columns, large = values(5), values(9), values(6, 4), values(70001)
    for tensors in (
        [twice, twice],
        [twice[:2], values(3), twice.view(5, 1), twice],
        [rows[2:7], rows[:5]],
        [columns[:, ::2], columns[:, 1::2]],
        [large[1:], large],
    ):
        with pytest.warns(FutureWarning):
            dist.all_reduce_coalesced(tensors, group=group)
    whole, greatest = values(8), values(8, dtype=torch.int64)
    with pytest.warns(FutureWarning):
        work = dist.all_reduce_coalesced([greatest] * 3, dist.ReduceOp.MAX, group, async_op=True)
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        dist.all_reduce(whole, group=group)
        dist.all_reduce(whole[4:], group=group)
    for waited_for in (work, manager):
        waited_for.wait()
    return twice, rows, columns, large, greatest, whole


def all_gather_coalesced(group: Group, rank: int, size: int) -> Any:
    inputs = [values(7), values(4, 5).t(), values(0), values(70001)]
    outputs = [[torch.zeros(tensor.shape) for tensor in inputs] for _ in range(size)]
    with pytest.warns(FutureWarning):
        dist.all_gather_coalesced(outputs, inputs, group=group)
    return outputs


def coalescing_manager(group: Group, rank: int, size: int) -> Any:
    tensors = [values(7), values(4, 5), values(20000)]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    return tensors


def coalesced_gathers_and_scatters(group: Group, rank: int, size: int) -> Any:
    gathered = [torch.zeros(size * count) for count in (5, 300)]
    with dist._coalescing_manager(group=group):
        for output in gathered:
            dist.all_gather_into_tensor(output, values(output.numel() // size), group=group)
    scattered = [torch.zeros(count) for count in (5, 300)]
    with dist._coalescing_manager(group=group):
        for output in scattered:
            dist.reduce_scatter_tensor(output, values(output.numel() * size), group=group)
    return gathered, scattered


def all_gather(group: Group, rank: int, size: int) -> Any:
    results = []
    for count in SIZES:
        for tensor in layouts(count):
            outputs = [torch.full_like(tensor, -1) for _ in range(size)]
            dist.all_gather(outputs, tensor, group=group)
            results.append(outputs)
    return results


def all_gather_into_strided_outputs(group: Group, rank: int, size: int) -> Any:
    storage = torch.zeros(size, 9, 2)
    dist.all_gather([storage[peer, :, 0] for peer in range(size)], values(9), group=group)
    return storage


def all_gather_into_tensor(group: Group, rank: int, size: int) -> Any:
    results = []
    for count in SIZES:
        output = torch.zeros(size * count)
        dist.all_gather_into_tensor(output, values(count), group=group)
        results.append(output)
    return results


def all_gather_in_place(group: Group, rank: int, size: int) -> Any:
    output = torch.zeros(size * 3000)
    mine = output[rank * 3000 : (rank + 1) * 3000]
    mine.copy_(values(3000))
    dist.all_gather_into_tensor(output, mine, group=group)
    return output


def reduce_scatter(group: Group, rank: int, size: int) -> Any:
    results = []
    for count in SIZES:
        inputs = [values(count) for _ in range(size)]
        output = torch.zeros(count)
        dist.reduce_scatter(output, inputs, group=group)
        results.append(output)
    return results


def reduce_scatter_of_strided_inputs(group: Group, rank: int, size: int) -> Any:
    inputs = values(size, 9, 2)
    storage = torch.zeros(9, 2)
    output = as_served(storage[:, 1], group)
    parts = [as_served(inputs[peer, :, 0], group) for peer in range(size)]
    dist.reduce_scatter(output, parts, group=group)
    storage[:, 1] = output
    return storage


def reduce_scatter_tensor(group: Group, rank: int, size: int) -> Any:
    results = []
    for count in SIZES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            output = torch.zeros(count)
            dist.reduce_scatter_tensor(output, values(size * count), op, group=group)
            results.append(output)
    return results


def reduce_scatter_in_place(group: Group, rank: int, size: int) -> Any:
    results = []
    for count in (5, 20011):
        storage = values(size * count)
        output = storage[rank * count : (rank + 1) * count]
        dist.reduce_scatter_tensor(output, storage, group=group)
        results.append(output)
    return results


def reduce_scatter_of_parts_that_differ(group: Group, rank: int, size: int) -> Any:
    parts = [torch.arange(2.0 + peer) + rank for peer in range(size)]
    output = torch.zeros(2 + rank)
    dist.reduce_scatter(output, parts, group=group)
    return output


def what_autograd_hears_of(group: Group, rank: int, size: int) -> Any:
    """Whether outputs count as written to: a graph that has saved one may not use it then."""
    share, all_of_them = torch.ones(3), torch.ones(3 * size)
    parts = [torch.ones(3) for _ in range(size)]
    calls: list[tuple[list[torch.Tensor], Callable[[], object]]] = [
        ([all_of_them], lambda: dist.all_gather_into_tensor(all_of_them, share, group=group)),
        (parts, lambda: dist.all_gather(parts, share, group=group)),
        ([share], lambda: dist.reduce_scatter(share, parts, group=group)),
        ([share], lambda: dist.reduce_scatter_tensor(share, all_of_them, group=group)),
        ([share], lambda: dist.all_reduce(share, group=group)),
        ([share], lambda: dist.broadcast(share, 0, group=group)),
    ]
    heard = []
    for outputs, call in calls:
        before = [tensor._version for tensor in outputs]
        call()
        heard += [tensor._version > then for tensor, then in zip(outputs, before, strict=True)]
    return heard


def what_gloo_refuses(group: Group, rank: int, size: int) -> Any:
    """In its own words: nobody has to look for a hang."""
    said = []
    for tensor, op in (
        (torch.tensor([True, False]), dist.ReduceOp.AVG),
        (torch.ones(3), dist.ReduceOp.BAND),
    ):
        try:
            dist.all_reduce(tensor, op, group=group)
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
    with pytest.raises(ValueError, match="Tensors must be contiguous"):
        dist.all_to_all_single(torch.zeros(size, 3), values(3, size).t(), group=group)
    return said


def what_only_gloo_has(group: Group, rank: int, size: int) -> Any:
    """Programs ask the backend of a group that they know to be gloo's."""
    backend: Any = group._get_backend(torch.device("cpu"))
    devices = [backend.create_device(interface="lo"), backend.create_default_device()]
    assert all(isinstance(device, backend.Device) for device in devices)
    backend._set_default_timeout(timedelta(seconds=77))
    return backend.options._timeout


def broadcast(group: Group, rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        for count in SIZES:
            for tensor in layouts(count):
                served = as_served(tensor, group)
                dist.broadcast(served, group=group, group_src=root)
                results.append(served)
    return results


def reduce(group: Group, rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        tensor = values(1023)
        dist.reduce(tensor, group=group, group_dst=root)
        results += [tensor] if rank == root else []
    return results


def gather(group: Group, rank: int, size: int) -> Any:
    outputs = [torch.zeros(7) for _ in range(size)] if rank == 1 else None
    dist.gather(values(7), outputs, group=group, group_dst=1)
    return outputs or []


def scatter(group: Group, rank: int, size: int) -> Any:
    output = torch.zeros(7)
    inputs = [values(7) for _ in range(size)] if rank == 1 else None
    dist.scatter(output, inputs, group=group, group_src=1)
    return output


def all_to_all_single(group: Group, rank: int, size: int) -> Any:
    even = torch.zeros(size, 5)
    dist.all_to_all_single(even, values(size, 5), group=group)
    # Rank r sends r + p + 1 elements to p.
    splits = [rank + peer + 1 for peer in range(size)]
    uneven = torch.zeros(sum(splits))
    dist.all_to_all_single(uneven, values(sum(splits)), splits, splits, group=group)
    return even, uneven


def send_and_recv(group: Group, rank: int, size: int) -> Any:
    left, right = (rank - 1) % size, (rank + 1) % size
    received = torch.zeros(1023)
    sending = dist.isend(values(1023), group=group, group_dst=right, tag=3)
    dist.recv(received, group=group, group_src=left, tag=3)
    assert sending is not None
    sending.wait()
    return received


def batch_of_sends_and_recvs(group: Group, rank: int, size: int) -> Any:
    left, right = (rank - 1) % size, (rank + 1) % size
    received = torch.zeros(40)
    operations = [
        dist.P2POp(dist.isend, values(40), group=group, group_peer=right),
        dist.P2POp(dist.irecv, received, group=group, group_peer=left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def objects(group: Group, rank: int, size: int) -> Any:
    mine = {"rank": rank, "text": "x" * (10 + 100 * rank)}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine, group=group)
    at_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, at_root, group=group, group_dst=0)
    shared = [mine, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, group=group, group_src=1)
    part: list[Any] = [None]
    parts = [("part", peer) for peer in range(size)] if rank == 0 else None
    dist.scatter_object_list(part, parts, group=group, group_src=0)
    return gathered, at_root, shared, part


def barrier(group: Group, rank: int, size: int) -> Any:
    dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    assert work is not None
    work.wait()
    return None


def asynchronous(group: Group, rank: int, size: int) -> Any:
    tensors = [values(count) for count in (5, 70001, 0, 300)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    # A tensor of its own: gloo does not order asynchronous operations on the same one.
    tensors.append(values(70001))
    works.append(dist.broadcast(tensors[-1], group=group, group_src=0, async_op=True))
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
        assert work.is_success()
    return tensors


def futures(group: Group, rank: int, size: int) -> Any:
    tensor = values(1023)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    halved = work.get_future().then(lambda future: future.value()[0] / 2)
    return halved.wait(), tensor


def functional(group: Group, rank: int, size: int) -> Any:
    import torch.distributed._functional_collectives as functional_collectives

    f = functional_collectives
    splits = [3] * size
    results = [
        f.all_reduce(values(7), "sum", group),
        f.all_gather_tensor(values(7), 0, group),
        f.reduce_scatter_tensor(values(size * 7), "sum", 0, group),
        f.broadcast(values(7), 0, group),
        f.all_to_all_single(values(size * 3), splits, splits, group),
        *f.all_reduce_coalesced([values(7), values(3)], "max", group),
        *f.all_gather_into_tensor_coalesced([values(7), values(3)], group),
        *f.reduce_scatter_tensor_coalesced([values(size * 2), values(size)], "sum", [0, 0], group),
    ]
    return [f.wait_tensor(result) for result in results]


def with_gradients(group: Group, rank: int, size: int) -> Any:
    import torch.distributed.nn.functional as functional

    weights = values(size, 6).requires_grad_()
    total = functional.all_reduce(weights * 2, group=group)
    parts = functional.all_gather(weights[0], group=group)
    (total.sum() + sum(part.square().sum() for part in parts)).backward()
    return total.detach(), weights.grad


CASES: list[Case] = [
    all_reduce,
    all_reduce_of_a_scalar,
    all_reduce_coalesced,
    all_reduce_of_lists_that_share_memory,
    all_gather_coalesced,
    coalescing_manager,
    coalesced_gathers_and_scatters,
    all_gather,
    all_gather_into_strided_outputs,
    all_gather_into_tensor,
    all_gather_in_place,
    reduce_scatter,
    reduce_scatter_of_strided_inputs,
    reduce_scatter_in_place,
    reduce_scatter_tensor,
    reduce_scatter_of_parts_that_differ,
    what_autograd_hears_of,
    what_gloo_refuses,
    what_only_gloo_has,
    broadcast,
    reduce,
    gather,
    scatter,
    all_to_all_single,
    send_and_recv,
    batch_of_sends_and_recvs,
    objects,
    barrier,
    asynchronous,
    futures,
    functional,
    with_gradients,
]


def run_case(rank: int, world_size: int, name: str) -> None:
    case: Case = globals()[name]
    results = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        torch.manual_seed(rank)
        results.append(case(group, rank, world_size))
    ours, theirs = (tree_flatten(result) for result in results)
    assert ours[1] == theirs[1]
    for mine, expected in zip(ours[0], theirs[0], strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)
        else:
            assert mine == expected


# With three ranks all of them run while plans are tried, below.
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.extended)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_same_as_gloo(case: Case, world_size: int) -> None:
    spawn_ranks(run_case, world_size, case.__name__, backend=BACKEND)


def run_all_cases(rank: int, world_size: int) -> None:
    for case in CASES:
        run_case(rank, world_size, case.__name__)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.extended), 3])
def test_same_as_gloo_while_plans_are_tried(world_size: int, tmp_path: Path) -> None:
    """As users have it: tuning is on, and nothing is known yet."""
    env = {"DEEPYTORCH_TUNE": "auto", "DEEPYTORCH_PROFILE": str(tmp_path / "profile.json")}
    spawn_ranks(run_all_cases, world_size, backend=BACKEND, env=env, fresh=True)


BACKEND = "deepytorch"


def random_program(rank: int, world_size: int, seed: int) -> None:
    """A long mix of operations that all ranks draw from the same seed."""
    gloo = dist.new_group(backend="gloo")
    draw = torch.Generator().manual_seed(seed)

    def pick(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=draw))

    open_works: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []
    for step in range(80):
        count = (0, 1, 3, 77, 1024, 5003, 20011)[pick(7)]
        dtype = (torch.float32, torch.bfloat16, torch.int64)[pick(3)]
        kind, root, wait_now = pick(5), pick(world_size), pick(3) > 0
        torch.manual_seed(seed * 1000 + step * 10 + rank)
        ours = values(count * world_size, dtype=dtype)
        theirs = ours.clone()
        works = []
        for tensor, group in ((ours, dist.group.WORLD), (theirs, gloo)):
            mine = tensor[:count]
            if kind == 0:
                work = dist.all_reduce(mine, group=group, async_op=True)
            elif kind == 1:
                work = dist.broadcast(mine, group=group, group_src=root, async_op=True)
            elif kind == 2:
                work = dist.all_gather_into_tensor(tensor, mine.clone(), group, async_op=True)
            elif kind == 3:
                source = tensor.clone()
                work = dist.reduce_scatter_tensor(mine, source, group=group, async_op=True)
            else:
                source = tensor.clone()
                work = dist.all_to_all_single(tensor, source, group=group, async_op=True)
            works.append(work)
        works[1].wait()
        open_works.append((works[0], ours, theirs))
        if wait_now or step == 79:
            for work, mine, expected in open_works:
                work.wait()
                torch.testing.assert_close(mine, expected, rtol=0, atol=0, msg=f"step {step}")
            open_works.clear()


@pytest.mark.parametrize(("world_size", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_random_programs(world_size: int, seed: int) -> None:
    spawn_ranks(random_program, world_size, seed, backend=BACKEND)


def one_tensor_many_operations(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)  # the same numbers on every rank
    for _ in range(20):
        inputs = torch.randint(-4, 5, (world_size, 70001), generator=generator).float()
        tensor = inputs[rank].clone()
        works = [
            dist.all_reduce(tensor, async_op=True),
            dist.broadcast(tensor, 0, async_op=True),
            dist.all_reduce(tensor, async_op=True),
        ]
        for work in reversed(works):
            work.wait()
        assert torch.equal(tensor, inputs.sum(0) * world_size)


def test_asynchronous_operations_on_one_tensor_keep_their_order() -> None:
    spawn_ranks(one_tensor_many_operations, 3, backend=BACKEND)


def strides_of_its_own(rank: int, world_size: int) -> None:
    """Ranks may hold the same logical tensor in different layouts; gaps stay untouched."""
    expected = torch.arange(12.0).reshape(3, 4) * world_size
    storage = torch.full((3, 8), -1.0)
    tensor = torch.zeros(3, 4) if rank == 0 else storage[:, ::2]
    tensor.copy_(torch.arange(12.0).reshape(3, 4))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, expected)
    assert rank == 0 or torch.equal(storage[:, 1::2], torch.full((3, 4), -1.0))
    column_major = torch.arange(12.0).reshape(4, 3).t() if rank == 0 else torch.zeros(3, 4)
    dist.broadcast(column_major, 0)
    assert torch.equal(column_major, torch.arange(12.0).reshape(4, 3).t())


def test_ranks_with_different_strides() -> None:
    spawn_ranks(strides_of_its_own, 2, backend=BACKEND)


def native_calls(rank: int, world_size: int) -> dict[str, str]:
    from deepytorch_core import _core

    _core.reset_statistics()
    tensor = values(5000)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.all_gather_into_tensor(torch.zeros(5000 * world_size), tensor)
    dist.reduce_scatter_tensor(torch.zeros(2500), values(2500 * world_size))
    dist.barrier()
    dist.all_to_all_single(torch.zeros(4 * world_size), values(4 * world_size))
    dist.reduce(tensor, 0)
    parts = [torch.zeros(5000) for _ in range(world_size)] if rank == 0 else None
    dist.gather(tensor, parts, dst=0)
    dist.scatter(tensor, parts, src=0)
    return {row["op"]: row["algorithm"] for row in _core.statistics() if row["calls"]}


def test_what_is_native() -> None:
    for algorithms in spawn_ranks(native_calls, 2, backend=BACKEND):
        assert set(algorithms) == {
            "all_reduce",
            "broadcast",
            "all_gather",
            "reduce_scatter",
            "barrier",
            "all_to_all",
            "reduce",
            "gather",
            "scatter",
        }
        assert "delegate" not in algorithms.values()


def delegated_calls(rank: int, world_size: int) -> set[tuple[str, str]]:
    from deepytorch_core import _core

    _core.reset_statistics()
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (world_size,))
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.ones(world_size))
    return {(row["algorithm"], row["reason"]) for row in _core.statistics() if row["calls"]}


def test_what_has_no_native_form_is_delegated_and_says_why() -> None:
    for calls in spawn_ranks(delegated_calls, 2, backend=BACKEND):
        assert calls == {("delegate", "sparse tensors")}
