"""Operations of Horovod's API are paired by name, in whatever order the ranks begin them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepytorch.integrations.horovod as hvd
from deepytorch_core.base import config
from deepytorch_core.testing import assert_same_on_all_ranks, spawn_ranks

NAMES = [f"layer.{number}" for number in range(7)]


def each_in_its_own_order(rank: int, world_size: int) -> None:
    hvd.init()
    order = NAMES[rank:] + NAMES[:rank]
    begin: dict[str, Callable[[str, torch.Tensor], Any]] = {
        "reduce": lambda name, x: hvd.allreduce_async(x, name=name, op=hvd.Sum),
        "in place": lambda name, x: hvd.allreduce_async_(x, name=name, op=hvd.Sum),
        "group": lambda name, x: hvd.grouped_allreduce_async([x], name=name, op=hvd.Sum),
        "gather": lambda name, x: hvd.allgather_async(x[:1], name),
        "give": lambda name, x: hvd.broadcast_async(x, 1, name),
        "exchange": lambda name, x: hvd.alltoall_async(x, [1] * world_size, name),
        "scatter": lambda name, x: hvd.reducescatter_async(x, name, hvd.Sum),
    }
    for kind, start in begin.items():
        # The same shapes throughout: paired by order, sums of other layers would come out.
        handles = {}
        for name in order:
            value = torch.full((world_size,), float(10**rank * (1 + NAMES.index(name))))
            handles[name] = start(f"{kind}.{name}", value)
        for number, name in enumerate(NAMES[::-1]):
            if number == rank:
                hvd.barrier()  # belongs to no name
            result = hvd.synchronize(handles[name])
            factor = 1 + NAMES.index(name)
            expected = [11 * factor] * 2
            if kind in ("gather", "exchange"):
                expected = [factor, 10 * factor]
            if kind == "give":
                expected = [10 * factor] * 2
            if kind == "scatter":
                expected = [11 * factor]
            found = result[0] if kind in ("group", "exchange") else result
            assert found.tolist() == expected, (kind, name)
        for _ in range(2):
            assert hvd.poll(handles[NAMES[0]])
    hvd.shutdown()


@pytest.mark.parametrize("backend", ["deepytorch", "gloo"])
def test_ranks_begin_in_orders_of_their_own(backend: str) -> None:
    env = {} if backend == "deepytorch" else {"DEEPYTORCH_ENABLED": "0"}
    spawn_ranks(each_in_its_own_order, 2, backend=backend, env=env, fresh=backend == "gloo")


class SetOfHandles:
    """Averages gradients as optimizers do that were derived from Horovod's. `step` begins those
    that hooks have not begun, in the order of a set, which differs in every process."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.handles: dict[torch.Tensor, Any] = {}

    def begin(self, parameters: Any) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            self.handles[parameter] = hvd.allreduce_async_(gradient, name=self.names[parameter])

    def synchronize(self, salt: int) -> None:
        missing = set(self.names) - set(self.handles)
        self.begin(sorted(missing, key=lambda parameter: hash((salt, self.names[parameter]))))
        for handle in self.handles.values():
            hvd.synchronize(handle) if not callable(handle) else handle()
        self.handles.clear()


def with_an_optimizer_of_their_own(rank: int, world_size: int) -> None:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    reference = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    reference.load_state_dict(model.state_dict())
    averaging = SetOfHandles(model)
    for step in range(3):
        batches = [
            torch.randn(2, 4, generator=torch.Generator().manual_seed(step + r)) for r in range(3)
        ]
        model(batches[rank]).square().mean().backward()
        (sum(reference(batch).square().mean() for batch in batches) / 3).backward()
        averaging.begin(list(model[rank].parameters()))
        averaging.synchronize(rank)
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)
            own.data -= 0.1 * own.grad
            expected.data -= 0.1 * expected.grad
            own.grad = expected.grad = None
    for name, parameter in model.named_parameters():
        assert_same_on_all_ranks(parameter.detach(), name)
    hvd.shutdown()


def test_an_optimizer_that_goes_through_a_set() -> None:
    spawn_ranks(with_an_optimizer_of_their_own, 3, backend="deepytorch")


def twice(rank: int, world_size: int) -> None:
    first = hvd.ProcessSet([0])
    hvd.init(process_sets=[first])
    value = torch.ones(world_size)
    begin: list[Callable[[], Any]] = [
        lambda: hvd.allreduce_async(value, name="n"),
        lambda: hvd.grouped_allreduce_async_([value, value], name="n"),
        lambda: hvd.allgather_async(value, "n"),
        lambda: hvd.grouped_allgather_async([value, value], "n"),
        lambda: hvd.broadcast_async(value, 0, "n"),
        lambda: hvd.alltoall_async(value, name="n"),
        lambda: hvd.reducescatter_async(value, "n"),
        lambda: hvd.sparse_allreduce_async(value.to_sparse(), "n", hvd.Sum),
    ]
    for start in begin:
        if rank == 1:
            hvd.barrier()  # rank 0's is under way until this rank begins it
        handle = start()
        if rank == 0:
            with pytest.raises(ValueError, match="a tensor with the same name as another"):
                start()
            hvd.barrier()
        hvd.synchronize(handle)
        hvd.synchronize(start())  # under way no more
    if rank == 0:  # a set's names are its own
        assert hvd.allreduce(value, name="n", process_set=first).tolist() == [1.0] * world_size
    hvd.shutdown()


def test_a_name_that_is_under_way_is_refused() -> None:
    spawn_ranks(twice, 2, backend="deepytorch")


def differ_under_a_name(rank: int, world_size: int) -> list[str]:
    hvd.init()
    value, said = torch.ones(4), []
    for wrong in (
        lambda: hvd.allreduce_async(torch.ones(2, 2) if rank else value, name="shape"),
        lambda: hvd.allreduce_async(value, name="op", op=[hvd.Sum, hvd.Max][rank]),
        lambda: hvd.allreduce_async(value, name="scale", op=hvd.Sum, prescale_factor=1.0 + rank),
        lambda: hvd.grouped_allreduce_async([value] * (1 + rank), name="count"),
        lambda: hvd.broadcast_async(value, rank, "root"),
        lambda: hvd.broadcast_async(value, 0, "k") if rank else hvd.allgather_async(value, "k"),
        lambda: hvd.allgather_async(value if rank else torch.tensor(1.0), "scalar"),
        lambda: hvd.alltoall_async(value, [2.5, 1.5] if rank == 0 else [2, 2], "whole"),
    ):
        with pytest.raises((hvd.HorovodInternalError, ValueError)) as error:
            hvd.synchronize(wrong())
        said.append(str(error.value))
    assert hvd.allreduce(value, name="shape", op=hvd.Sum).tolist() == [2.0] * 4
    hvd.shutdown()
    return said


def test_what_differs_is_told_to_all_ranks_and_they_go_on() -> None:
    for said in spawn_ranks(differ_under_a_name, 2, backend="deepytorch"):
        assert said[0] == "Mismatched tensor shapes: rank 0 has [4], rank 1 has [2, 2] (shape)"
        assert said[1].startswith("Mismatched reduction operations: rank 0 has 1, rank 1 has 4")
        assert said[2].startswith("Mismatched prescale and/or postscale factors: ")
        assert said[3].startswith("Mismatched data types: ")
        assert said[4] == "Mismatched root ranks: rank 0 has 0, rank 1 has 1 (root)"
        assert said[5].startswith("Mismatched operations: rank 0 has allgather, rank 1 has broad")
        assert said[6].startswith("allgather: a scalar has no rows: give it a first dimension")
        assert said[7].startswith("alltoall: splits [2.5, 1.5] must be whole numbers")


def wait_for_each_other(rank: int, world_size: int) -> str:
    config.set_current(None)
    hvd.init(debug=True)
    handle = hvd.allreduce_async(torch.ones(1), name="both")
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allgather(torch.ones(1), name=f"of rank {rank}")
    assert hvd.synchronize(handle).item() == 1.0
    hvd.shutdown()
    return str(error.value)


def test_ranks_that_wait_for_each_other_are_told() -> None:
    first, second = spawn_ranks(wait_for_each_other, 2, backend="deepytorch")
    assert first == second
    assert first.startswith(
        "rank 0 waits for allgather of rank 0; rank 1 waits for allgather of rank 1: none can go on"
    )


def leave_something_begun(rank: int, world_size: int) -> tuple[float, list[str]]:
    hvd.init()
    handles = [hvd.allreduce_async(torch.ones(3), name="both")]
    if rank == 0:
        handles.append(hvd.allreduce_async(torch.ones(3), name="mine"))
    hvd.synchronize(handles[0])
    time.sleep(0.1)  # the thread of rank 0 waits for rank 1's
    assert [hvd.poll(handle) for handle in handles] == [True, False][: 2 - rank]
    hvd.barrier()  # who ends first ends what the other one has begun
    began = time.monotonic()
    hvd.shutdown()
    took_s = time.monotonic() - began
    if rank == 0:
        with pytest.raises(hvd.HorovodInternalError, match="^mine: "):
            hvd.synchronize(handles[1])
    return took_s, [thread.name for thread in threading.enumerate() if "horovod" in thread.name]


def test_shutdown_with_something_begun_ends_its_thread() -> None:
    for took_s, threads in spawn_ranks(leave_something_begun, 2, backend="deepytorch", fresh=True):
        assert took_s < 20
        assert threads == []


def die(rank: int, world_size: int) -> str:
    hvd.init()
    hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="alive"))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="gone"))
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(3))
    return str(error.value)


def test_a_rank_that_died_is_named() -> None:
    said = spawn_ranks(die, 2, backend="deepytorch", expect_dead={1}, fresh=True)
    assert said[0].startswith("gone: ")
    assert "rank 1" in said[0]


def tell_much(rank: int, world_size: int) -> None:
    hvd.init()
    many = [torch.full((1 + size % 3,), float(size)) for size in range(300)]
    sums = hvd.grouped_allreduce(many, name="n" * 3000, op=hvd.Sum)
    assert all(torch.equal(found, 2 * own) for found, own in zip(sums, many, strict=True))
    hvd.shutdown()


def test_more_than_fits_a_rounds_frame() -> None:
    spawn_ranks(tell_much, 2, backend="deepytorch")


def handle_forms(rank: int, world_size: int) -> None:
    hvd.init()
    sparse = torch.sparse_coo_tensor([[rank]], [2.0], (3,))
    handle = hvd.sparse_allreduce_async(sparse, "s", hvd.Average)
    assert callable(handle)
    assert handle().to_dense().tolist() == [1.0, 1.0, 0.0]
    assert hvd.synchronize(handle) is handle()
    rows, counts = hvd.synchronize(hvd.alltoall_async(torch.arange(4)))  # also without splits
    assert (rows.tolist(), counts.tolist()) == ([2 * rank, 2 * rank + 1] * 2, [2, 2])
    splits = torch.tensor([1, 3], dtype=torch.int64)
    assert hvd.alltoall(torch.arange(4), splits)[1].dtype is torch.int32
    in_process_set = hvd.reducescatter_async(torch.ones(2), "r", hvd.Sum, hvd.global_process_set)
    assert {in_process_set: 1}[in_process_set] == 1
    assert in_process_set().tolist() == [2.0]
    assert hvd.size_op().tolist() == 2
    assert dist.get_world_size() == 2
    hvd.shutdown()


def test_forms_of_handles() -> None:
    spawn_ranks(handle_forms, 2, backend="deepytorch")
