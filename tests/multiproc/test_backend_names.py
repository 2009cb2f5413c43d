"""The name of the backend, wherever torch tells it: the same as without deepytorch.

Programs branch on it, so each body below runs over stock gloo and over ours, and has to give the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from deepytorch_core.c10d import activation
from deepytorch_core.c10d import patches as c10d_patches
from deepytorch_core.testing import rank_store, spawn_ranks

TIMEOUT = timedelta(seconds=40)
Body = Callable[[], Any]


def init(rank: int, world_size: int, backend: str | None) -> None:
    dist.init_process_group(
        backend, store=rank_store("world"), rank=rank, world_size=world_size, timeout=TIMEOUT
    )


def run(rank: int, world_size: int, backend: str | None, body: Body, when: str) -> Any:
    """`body` over stock, over groups that are ours from the start, or over upgraded ones."""
    if when == "before":
        activation.activate()
    init(rank, world_size, backend)
    if when == "after":
        activation.activate()
    served = c10d_patches.serving_name()
    assert (served == "deepytorch") == (when != "never")
    return body()


def as_on_stock(backend: str | None, body: Body) -> Any:
    """Return what `body` gives on rank 0, checked to be the same on stock and each kind of ours."""
    # Fresh, as torch's choice of a name depends on the backends that a process has heard of.
    found = {
        when: spawn_ranks(run, 2, backend, body, when, fresh=True)
        for when in ("never", "before", "after")
    }
    assert found["before"] == found["never"]
    assert found["after"] == found["never"]
    return found["never"][0]


def told(group: Any) -> list[Any]:
    """Everything that tells the name of a group's backend."""
    serving = group._get_backend(torch.device("cpu"))
    return [
        dist.get_backend(group),
        dist.get_backend(group) is dist.Backend.GLOO,
        dist.get_backend_config(group),
        group.name(),
        group._get_backend_name(),
        serving.name(),
        serving.options.backend,
        sorted(str(device) for device in group._device_types),
        group._has_hooks(),
    ]


def names_of_groups() -> list[Any]:
    everyone = list(range(dist.get_world_size()))
    groups = [c10d._get_default_group()]
    groups += [dist.new_group(everyone, backend=asked) for asked in (None, "gloo", "cpu:gloo")]
    groups.append(dist.new_subgroups(group_size=2)[0])
    groups.append(init_device_mesh("cpu", (2,)).get_group())
    return [told(group) for group in groups]


@pytest.mark.parametrize(
    "backend",
    [
        None,
        pytest.param("gloo", marks=pytest.mark.extended),
        "GLOO",
        pytest.param("cpu:gloo", marks=pytest.mark.extended),
        "cpu:gloo,cuda:gloo",
    ],
)
def test_all_names_are_those_that_were_asked_for(backend: str | None) -> None:
    found = as_on_stock(backend, names_of_groups)
    assert "deepytorch" not in str(found)


def names_elsewhere() -> list[Any]:
    """Names in the logs and profiles that other parts of torch keep."""
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with torch.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        dist.broadcast(torch.ones(3), 0)
        dist.reduce(torch.ones(3), 0)
        parts = [torch.ones(3) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.ones(3))
        dist.scatter(torch.ones(3), parts if dist.get_rank() == 0 else None, 0)
        dist.gather(torch.ones(3), parts if dist.get_rank() == 0 else None, 0)
        peer = 1 - dist.get_rank()
        work = dist.isend(torch.ones(2), peer)
        dist.recv(torch.ones(2), peer)
        work.wait()
    events = {event.key for event in profiler.key_averages() if ":" in event.key}
    information = profiler._get_distributed_info()
    logged = model._get_ddp_logging_data()
    return [
        # The second is read from gloo's class, unasked whether that is what serves the group.
        [logged[key] for key in ("backend_name", "gloo_num_threads", "gloo_socket_ifname")],
        sorted(name for name in events if not name.startswith(("aten:", "c10d:"))),
        [information[key] for key in ("backend", "pg_count", "pg_config")],
        [entry["backend_config"] for entry in c10d._world.pg_config_info],
    ]


def test_logs_and_profiles_bear_the_names_of_stock() -> None:
    found = as_on_stock("gloo", names_elsewhere)
    assert "gloo:all_reduce" in found[1]


def membership() -> list[Any]:
    """Forms in which public scripts ask."""
    backend = dist.get_backend()
    chosen = {
        "gloo": torch.nn.Linear,
        "nccl": torch.nn.Identity,
    }[backend]
    if backend not in ["gloo", "nccl"] or backend == "mpi":
        raise RuntimeError(f"unknown backend {backend}")
    return [
        "cpu" if backend == "gloo" else "cuda",
        chosen.__name__,
        backend in (dist.Backend.GLOO, dist.Backend.NCCL),
        dist.Backend(backend) == dist.Backend.GLOO,
        dist.distributed_c10d._get_default_timeout(backend).total_seconds(),
        str(backend).startswith("gl"),
    ]


def groups_by_name() -> list[Any]:
    """Groups that are made with another group's name, as FSDP and Megatron make theirs."""
    default = c10d._get_default_group()
    copied = dist.new_group(backend=dist.get_backend(default), timeout=TIMEOUT)
    paired = dist.new_group(backend=dist.get_backend_config(default).split(",")[0])
    value = torch.ones(4)
    for group in (copied, paired):
        dist.all_reduce(value, group=group)
    return [told(copied), told(paired), value.tolist()]


def only_for_gloo() -> list[Any]:
    """Functions that torch has for the name gloo alone."""
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    inputs = [torch.full((2,), float(dist.get_rank()), requires_grad=True) for _ in range(2)]
    outputs = [torch.empty(2) for _ in range(2)]
    from torch.distributed.nn import functional

    received = functional.all_to_all(outputs, inputs, group=dist.group.WORLD)  # type: ignore[no-untyped-call]
    torch.stack(received).sum().backward()  # type: ignore[no-untyped-call]
    return [[part.tolist() for part in received], [tensor.grad.tolist() for tensor in inputs]]


def synchronized_batch_norm() -> list[Any]:
    """It takes another collective for gloo; on CPUs torch refuses it with its own words."""
    model = torch.nn.SyncBatchNorm(3)
    try:
        return [model(torch.ones(2, 3)).tolist()]
    except ValueError as error:
        return [str(error)]


@pytest.mark.parametrize(
    "body", [membership, groups_by_name, only_for_gloo, synchronized_batch_norm]
)
def test_programs_that_branch_on_the_name_take_their_branch(body: Body) -> None:
    as_on_stock("gloo", body)


def asked_for_ours() -> list[Any]:
    group = dist.new_group()
    gloo = dist.new_group(backend="gloo")
    named = dist.new_group(backend="deepytorch")
    return [dist.get_backend(each) for each in (c10d._get_default_group(), group, gloo, named)]


def test_our_own_name_is_told_where_it_was_asked_for() -> None:
    ours = spawn_ranks(run, 2, "deepytorch", asked_for_ours, "before")
    assert ours[0] == ["deepytorch", "deepytorch", "gloo", "deepytorch"]
    stock = spawn_ranks(run, 2, "gloo", asked_for_ours, "before")
    assert stock[0] == ["gloo", "gloo", "gloo", "deepytorch"]


def on_and_off(rank: int, world_size: int) -> list[Any]:
    init(rank, world_size, "gloo")
    group = dist.new_group()
    found = [told(group)]
    serving = []
    for switch in (activation.activate, activation.deactivate) * 2:
        switch()
        found.append(told(group))
        serving.append(c10d_patches.serving_name(group))
    assert all(answer == found[0] for answer in found)
    return serving


def test_names_stay_while_it_is_switched_on_and_off() -> None:
    assert spawn_ranks(on_and_off, 2)[0] == ["deepytorch", "gloo"] * 2


def _trained_with_pairs(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.randn(2, 3, dtype=torch.float32, device="cpu")).sum().backward()
    return str(dist.group.WORLD.name())  # type: ignore[union-attr]


def test_ddp_takes_a_group_whose_pairs_are_all_ours() -> None:
    found = spawn_ranks(_trained_with_pairs, 2, backend="cuda:deepytorch,cpu:deepytorch")
    assert found == ["custom", "custom"]
