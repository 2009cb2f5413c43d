"""Some trainings of several ranks are told that they train apart, and some are not."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from deepytorch_core.testing import rank_store, run_script, spawn_ranks

LINE = "seem to train apart"


def model_of(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 8)).square().mean()


def train(
    model: nn.Module,
    steps: int = 6,
    *,
    optimizer: Optimizer | None = None,
    after: Callable[[int], object] = lambda step: None,
) -> None:
    """A plain loop; `after` is called at the end of each step."""
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        after(step)


# Ranks that train apart.


def unwrapped(rank: int) -> None:
    train(model_of(rank))


def unwrapped_and_logged(rank: int) -> None:
    """The loss is averaged for the log, and there are barriers."""

    def log(step: int) -> None:
        dist.all_reduce(torch.ones(()))
        dist.barrier()

    train(model_of(rank), after=log)


def known_backends_only(rank: int) -> None:
    """As a framework does that has a list of backends."""
    model = model_of(rank)
    train(DistributedDataParallel(model) if dist.get_backend() == "mpi" else model)
    dist.all_gather_object([None] * dist.get_world_size(), rank)


def module_of_the_wrapper(rank: int) -> None:
    wrapped = DistributedDataParallel(model_of(rank))
    train(wrapped.module, optimizer=sgd(wrapped))


def no_sync_never_left(rank: int) -> None:
    wrapped = DistributedDataParallel(model_of(rank))
    with wrapped.no_sync():
        train(wrapped)


def wrapper_of_one_rank(rank: int) -> None:
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    train(DistributedDataParallel(model_of(rank), process_group=groups[rank]))


def on_three_steps(rank: int) -> None:
    train(model_of(rank), steps=3)


APART = (
    # As few steps as that only before any other training of the process.
    *(on_three_steps, unwrapped, unwrapped_and_logged, known_backends_only),
    *(module_of_the_wrapper, no_sync_never_left, wrapper_of_one_rank),
)


# Ranks that do not, or not by mistake.


def ddp(rank: int) -> None:
    train(DistributedDataParallel(model_of(rank)))


def accumulated(rank: int) -> None:
    wrapped = DistributedDataParallel(model_of(rank))
    optimizer = sgd(wrapped)
    for batch in range(12):
        is_last = batch % 4 == 3
        with nullcontext() if is_last else wrapped.no_sync():
            loss_of(wrapped).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def compressed(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    wrapped = DistributedDataParallel(model_of(rank))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(wrapped)


def fsdp1(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    train(FullyShardedDataParallel(model_of(rank), device_id=torch.device("cpu")))


def fsdp2(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    train(fully_shard(model_of(rank), mesh=mesh))


def tensor_parallel(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    train(parallelize_module(model_of(0), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def zero_optimizer(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model_of(rank))
    parameters = wrapped.parameters()
    train(wrapped, optimizer=ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.01))


def gan(rank: int) -> None:
    """The discriminator takes three steps for one of the generator, which is of one rank alone."""
    generator, critic = DistributedDataParallel(model_of(rank)), model_of(rank)
    train(critic, 12, after=lambda step: train(generator, 1) if step % 3 == 2 else None)


def local_sgd(rank: int) -> None:
    """torch's own: DDP at first, then averages."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    wrapped = DistributedDataParallel(model_of(rank))
    alone = [dist.new_group([member]) for member in range(dist.get_world_size())][rank]
    state = local.PostLocalSGDState(None, alone, start_localSGD_iter=4)
    wrapped.register_comm_hook(state, local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=5, warmup_steps=4)
    train(wrapped, 22, optimizer=PostLocalSGDOptimizer(sgd(wrapped), averager))


def diloco(rank: int) -> None:
    """By hand: an outer optimizer steps by what all ranks moved since the last time."""
    model = model_of(0)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    outer = torch.optim.SGD([nn.Parameter(weight) for weight in kept], lr=0.7, momentum=0.9)

    def average(step: int) -> None:
        if step % 20 != 19:
            return
        for mine, kept_one in zip(model.parameters(), outer.param_groups[0]["params"], strict=True):
            kept_one.grad = kept_one.detach() - mine.detach()
            dist.all_reduce(kept_one.grad)
        outer.step()

    train(model, 50, after=average)


def averaged_at_the_end(rank: int) -> None:
    model = model_of(rank)
    train(model)
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)


def pipeline(rank: int) -> None:
    """Two stages: activations go there, their gradients come back."""
    stage = nn.Linear(8, 8)
    optimizer = sgd(stage)
    for _ in range(6):
        if rank == 0:
            output = stage(torch.randn(4, 8))
            dist.send(output.detach(), 1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, 1)
            output.backward(gradient)
        else:
            received = torch.empty(4, 8)
            dist.recv(received, 0)
            received.requires_grad_()
            stage(received).square().mean().backward()
            dist.send(received.grad, 0)
        optimizer.step()
        optimizer.zero_grad()


def gradients_as_objects(rank: int) -> None:
    model = model_of(rank)
    optimizer = sgd(model)
    for _ in range(6):
        loss_of(model).backward()
        mine = [parameter.grad for parameter in model.parameters()]
        dist.all_gather_object([None] * dist.get_world_size(), mine)
        optimizer.step()


def one_trains_for_samplers(rank: int) -> None:
    if rank == 0:
        train(model_of(rank), 20)
    dist.barrier()


def wrapped_with_a_local_helper(rank: int) -> None:
    """Beside a model of all ranks each has a critic of its own, which takes more steps."""
    wrapped, critic = DistributedDataParallel(model_of(rank)), model_of(rank)
    train(wrapped, 6, after=lambda step: train(critic, 5))


def probed_afterwards(rank: int) -> None:
    train(DistributedDataParallel(model_of(rank)))
    train(model_of(rank), 60)


def temperature(rank: int) -> None:
    scale = nn.Linear(1, 1, bias=False)
    optimizer = sgd(scale)
    for _ in range(6):
        scale(torch.ones(4, 1)).square().mean().backward()
        optimizer.step()


def evaluated(rank: int) -> None:
    model = model_of(rank)
    with torch.no_grad():
        for _ in range(6):
            dist.all_reduce(loss_of(model))


FINE = (
    *(ddp, accumulated, compressed, fsdp1, fsdp2, tensor_parallel, zero_optimizer, gan, local_sgd),
    *(diloco, averaged_at_the_end, pipeline, gradients_as_objects, one_trains_for_samplers),
    *(wrapped_with_a_local_helper, probed_afterwards, temperature, evaluated),
)


def told(
    rank: int, world_size: int, cases: tuple[Callable[[int], None], ...], **options: Any
) -> dict[str, int]:
    """How many lines each case printed on this rank, its group's end included."""
    import deepytorch

    deepytorch.activate(**options)
    lines = {}
    for case in cases:
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            store = rank_store(case.__name__)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            case(rank)
            dist.destroy_process_group()
        lines[case.__name__] = printed.getvalue().count(LINE)
    return lines


def in_all(cases: tuple[Callable[[int], None], ...], **options: Any) -> dict[str, int]:
    ranks = spawn_ranks(told, 2, cases, fresh=True, **options)
    return {case.__name__: sum(counts[case.__name__] for counts in ranks) for case in cases}


def test_ranks_that_train_apart_are_told_once() -> None:
    assert in_all(APART) == {case.__name__: 1 for case in APART}


def test_no_false_alarm() -> None:
    assert in_all(FINE) == {case.__name__: 0 for case in FINE}


def test_torchs_own_collectives_count_as_well() -> None:
    cases = (unwrapped, ddp, pipeline, local_sgd)
    found = in_all(cases, collectives="stock")
    assert found == {case.__name__: int(case is unwrapped) for case in cases}


def given_by_each(rank: int, world_size: int) -> dict[str, int]:
    """Bytes that count, by operation; of four or eight floats for each rank."""
    import deepytorch
    from deepytorch_core.metering import counts

    deepytorch.activate()
    store = rank_store("operations")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mine, all_ = torch.ones(4), torch.ones(8)
    sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (4,))
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    parts = [torch.ones(2) for _ in range(world_size)] if rank == 0 else None
    operations: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(mine),
        "all_reduce, sparse": lambda: dist.all_reduce(sparse),
        "reduce": lambda: dist.reduce(mine, 0),
        "broadcast": lambda: dist.broadcast(mine, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(all_, mine),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(mine, all_),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(4), mine),
        "scatter": lambda: dist.scatter(torch.empty(2), parts, 0),
        "send and receive": lambda: dist.send(mine, 1) if rank == 0 else dist.recv(mine, 0),
        "object": lambda: dist.broadcast_object_list([list(range(50))], 0),
        "barrier": dist.barrier,
        "a loss": lambda: dist.all_reduce(torch.ones(1)),
        "in a group of one": lambda: dist.all_reduce(mine, group=alone),
    }
    given = {}
    for name, start in operations.items():
        before = counts.given_bytes()
        start()
        given[name] = counts.given_bytes() - before
    return given


def test_what_counts_as_given() -> None:
    nothing = {"barrier", "a loss", "in a group of one"}
    for given in spawn_ranks(given_by_each, 2, fresh=True):
        assert {name for name, size in given.items() if size == 0} == nothing
        assert given["all_reduce"] == given["send and receive"] == 16
        assert given["reduce_scatter"] == 32


def zero(rank: int, world_size: int) -> str:
    """Return what is printed while DeepSpeed trains; it keeps its first groups for all stages."""
    import deepspeed

    import deepytorch
    from deepytorch_core.metering import apart

    deepytorch.activate()
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        dist.init_process_group("gloo")
        for stage in range(4):
            engine, *_ = deepspeed.initialize(
                model=model_of(rank),
                config={
                    "train_micro_batch_size_per_gpu": 4,
                    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
                    "zero_optimization": {"stage": stage},
                },
            )
            for _ in range(5):
                engine.backward(loss_of(engine))
                engine.step()
            assert apart._watch._synced is not None
            apart._end()
    return printed.getvalue()


@pytest.mark.extended
def test_deepspeed() -> None:
    told_by = spawn_ranks(zero, 2, fresh=True, preload=("deepspeed",), timeout_s=120)
    assert not any(LINE in printed for printed in told_by)


LONG = """
import sys, torch, torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group
import deepytorch
init_process_group()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
dist.barrier()
print("trained", flush=True)
destroy_process_group()
"""


def test_a_script_hears_of_it_with_the_way_to_silence_it(tmp_path: Any) -> None:
    script = tmp_path / "long.py"
    script.write_text(LONG)
    printed, errors = run_script(script, "1100", world_size=3)
    assert printed.count("trained") == 3
    assert errors.count(LINE) == 1
    assert "3 ranks" in errors
    _, errors = run_script(script, "5", variables={"DEEPYTORCH_LOG": "error"})
    assert LINE not in errors
