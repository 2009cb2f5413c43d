"""Effects of `import deepytorch` on the groups of several ranks, before and after they exist."""

from __future__ import annotations

import random
import re
import time
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import deepytorch_core.c10d.activation as activation
from deepytorch_core.base import agreement, unlisted
from deepytorch_core.base.errors import AdapterError
from deepytorch_core.c10d import adapter
from deepytorch_core.c10d import patches as c10d_patches
from deepytorch_core.report import summary
from deepytorch_core.testing import assert_same_on_all_ranks, rank_store, spawn_ranks

TIMEOUT = timedelta(seconds=40)


def init(rank: int, world_size: int, backend: str | None, name: str = "world") -> None:
    dist.init_process_group(
        backend, store=rank_store(name), rank=rank, world_size=world_size, timeout=TIMEOUT
    )


def names(group: dist.ProcessGroup | None = None) -> tuple[str, dict[str, str]]:
    """The name that torch tells, and what serves each device."""
    this = c10d._get_default_group() if group is None else group
    return dist.get_backend(group), c10d_patches.served(c10d, this)


def total(world_size: int, group: dist.ProcessGroup | None = None) -> float:
    """The sum of ones over a group: its size, if the group works."""
    value = torch.ones(3)
    dist.all_reduce(value, group=group)
    return value[0].item()


def native_calls() -> int:
    return summary.report().native_calls


def groups_of_each_kind(rank: int, world_size: int, backend: str | None) -> dict[str, Any]:
    activation.activate()
    init(rank, world_size, backend)
    before = native_calls()
    found: dict[str, Any] = {"default": names(), "total": total(world_size)}
    for asked in (None, "gloo", "deepytorch", "cpu:gloo"):
        group = dist.new_group(list(range(world_size)), backend=asked, group_desc="a sub-group")
        assert group.group_desc == "a sub-group"
        found[f"sub-group {asked}"] = names(group)
        assert total(world_size, group) == world_size
    found["native"] = native_calls() - before
    return found


SERVED = {"cpu": "deepytorch"}
OURS = ("gloo", SERVED)
GLOO = ("gloo", {"cpu": "gloo", "cuda": "gloo"})


@pytest.mark.parametrize(
    ("asked", "gloo_sub_group"),
    # A sub-group of gloo is gloo, unless gloo is what the whole job was asked to use.
    [(None, GLOO), ("gloo", OURS), ("cpu:gloo", GLOO), ("deepytorch", GLOO)],
)
def test_groups_made_after_the_import(
    asked: str | None, gloo_sub_group: tuple[str, dict[str, str]]
) -> None:
    for found in spawn_ranks(groups_of_each_kind, 2, asked):
        assert found == {
            "default": (asked or "undefined", SERVED),
            "total": 2,
            "sub-group None": (asked or "undefined", SERVED),
            "sub-group gloo": gloo_sub_group,
            "sub-group deepytorch": ("deepytorch", SERVED),
            "sub-group cpu:gloo": ("cpu:gloo", SERVED),
            "native": 4 if gloo_sub_group == GLOO else 5,
        }


def sub_groups(rank: int, world_size: int) -> dict[str, Any]:
    activation.activate()
    init(rank, world_size, "gloo")
    mine, _ = dist.new_subgroups(group_size=2)
    local = dist.new_group(
        [rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True, timeout=TIMEOUT
    )
    everyone = [dist.new_group(range(size)) for size in range(1, world_size + 1)]
    totals = [total(world_size, mine), total(world_size, local)]
    for group in everyone:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            assert names(group) == OURS
            totals.append(total(world_size, group))
    # Destroyed in no particular order, then everything once more in the same process.
    dist.destroy_process_group(mine)
    dist.destroy_process_group()
    init(rank, world_size, "gloo", "again")
    totals.append(total(world_size))
    return {"totals": totals, "names": names()}


def test_sub_groups_of_four_ranks_and_a_second_initialisation() -> None:
    found = spawn_ranks(sub_groups, 4)
    for rank, of_rank in enumerate(found):
        sizes = [float(size) for size in range(1, 5) if rank < size]
        assert of_rank == {"totals": [2, 2, *sizes, 4], "names": OURS}


def stacks_threads() -> list[str]:
    """Threads by which others learn what this process does, after some time to end."""
    for _ in range(20):
        names = [name for name in unlisted.names().values() if name == "deepytorch-stacks"]
        if not names:
            break
        time.sleep(0.05)
    return names


def upgrade(rank: int, world_size: int) -> dict[str, Any]:
    init(rank, world_size, "gloo")
    group = dist.new_group(list(range(world_size)), group_desc="mine")
    default = c10d._get_default_group()
    labels = [(g.group_name, g.group_desc) for g in (default, group)]
    stock = default._get_backend(torch.device("cpu"))
    total(world_size)
    started = dist.all_reduce(torch.ones(1), async_op=True)  # under way during the upgrade
    before = native_calls()

    activation.activate()
    started.wait()
    during = [names(), names(group), total(world_size), total(world_size, group)]
    calls = native_calls() - before
    complex_total = torch.ones(2, dtype=torch.complex64)
    dist.all_reduce(complex_total, dist.ReduceOp.SUM)
    newer = dist.new_group(list(range(world_size)))
    assert [(g.group_name, g.group_desc) for g in (default, group)] == labels
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("one", "all"))
    assert total(world_size, mesh.get_group("all")) == world_size
    during += [names(newer), total(world_size, newer), complex_total[0].real.item()]

    activation.deactivate()
    after = [names(), names(group), total(world_size), total(world_size, group)]
    assert default._get_backend(torch.device("cpu")) is stock
    assert stacks_threads()  # there is a group of ours
    assert names(newer) == OURS  # was made so, and has nothing to go back to
    assert total(world_size, newer) == world_size

    before = native_calls()
    activation.activate()
    again = [names(), total(world_size), native_calls() - before]
    dist.destroy_process_group()
    return {"during": during, "native": calls, "after": after, "again": again}


def test_existing_groups_are_upgraded_in_place_and_back() -> None:
    both = ("gloo", {"cpu": "deepytorch", "cuda": "gloo"})
    for found in spawn_ranks(upgrade, 2):
        assert found["during"] == [both, both, 2, 2, OURS, 2, 2]
        assert found["native"] == 2
        assert found["after"] == [GLOO, GLOO, 2, 2]
        assert found["again"] == [both, 2, 1]


def on_and_off(rank: int, world_size: int) -> list[tuple[float, list[str]]]:
    init(rank, world_size, "gloo")
    seen = []
    for switch in (activation.activate, activation.deactivate) * 2:
        switch()
        seen.append((total(world_size), stacks_threads()))
    return seen


def test_without_groups_of_ours_no_thread_is_left() -> None:
    on, off = (2, ["deepytorch-stacks"]), (2, [])
    assert spawn_ranks(on_and_off, 2, fresh=True) == [[on, off, on, off]] * 2


def upgrade_of_other_backends(rank: int, world_size: int) -> list[Any]:
    init(rank, world_size, "deepytorch")
    gloo = dist.new_group(backend="gloo")
    activation.activate()
    return [names(), names(gloo), total(world_size, gloo)]


def test_an_explicit_group_needs_no_upgrade_and_its_gloo_companion_stays() -> None:
    expected = [("deepytorch", SERVED), GLOO, 2]
    assert spawn_ranks(upgrade_of_other_backends, 2) == [expected] * 2


def unable(rank: int, world_size: int, *, before: bool) -> tuple[Any, ...]:
    def load() -> None:
        raise AdapterError("no C++ compiler here")

    lines = StringIO()
    original = adapter.load
    if rank == 1:
        adapter.load = load  # type: ignore[assignment]
    try:
        with redirect_stderr(lines):
            if before:
                init(rank, world_size, "gloo")
            activation.activate()
            if not before:
                init(rank, world_size, "gloo")
        return names(), total(world_size), lines.getvalue()
    finally:
        adapter.load = original


@pytest.mark.parametrize("before", [True, False])
def test_if_one_rank_is_unable_all_keep_stock_and_one_line_says_why(before: bool) -> None:
    found = spawn_ranks(unable, 2, before=before)
    assert [of_rank[:2] for of_rank in found] == [(GLOO, 2)] * 2
    assert found[0][2].count("\n") == 1
    assert "rank 1: no C++ compiler here" in found[0][2]
    assert found[1][2] == ""


def partial(rank: int, world_size: int, *, before: bool) -> tuple[Any, ...]:
    agreement.HERE_LIMIT_S = 0.5
    lines = StringIO()
    with redirect_stderr(lines):
        if before:
            init(rank, world_size, "gloo")
        if rank == 0:
            activation.activate()
        if not before:
            init(rank, world_size, "gloo")
    return names(), total(world_size), lines.getvalue()


@pytest.mark.parametrize("before", [True, False])
def test_if_only_some_ranks_import_it_nobody_hangs(before: bool) -> None:
    found = spawn_ranks(partial, 2, before=before, fresh=True)
    assert [of_rank[:2] for of_rank in found] == [(GLOO, 2)] * 2
    assert "rank 1 did not activate it within 0.5 s" in found[0][2]


def differing(rank: int, world_size: int, name: str, *values: Any, before: bool) -> tuple[Any, ...]:
    lines = StringIO()
    with redirect_stderr(lines):
        if before:
            init(rank, world_size, "gloo")
        activation.activate(**{name: values[rank]})
        if not before:
            init(rank, world_size, "gloo")
    return names(), total(world_size), lines.getvalue()


@pytest.mark.parametrize(
    ("name", "values", "differ"),
    [
        ("collectives", ("auto", "stock"), True),
        ("deterministic", (True, False), True),
        ("collectives", ("stock", "stock"), False),
        ("log", ("info", "warning"), False),
    ],
)
def test_options_that_differ_between_ranks_are_told_to_all(
    name: str, values: tuple[Any, ...], *, differ: bool
) -> None:
    before = random.random() < 0.5
    found = spawn_ranks(differing, 2, name, *values, before=before, fresh=True)
    stock = differ or values[0] == "stock"
    assert [(of_rank[0] == GLOO, of_rank[1]) for of_rank in found] == [(stock, 2)] * 2
    text = found[0][2]
    assert ("give every rank the same" in text) == differ, (before, text)
    if differ:
        assert f"{name}={values[0]}" in text
        assert f"{name}={values[1]}" in text


def rewrite_of_nccl(rank: int, world_size: int) -> list[Any]:
    # This machine may have no GPU; the names and the bookkeeping can be seen all the same.
    original = c10d.is_nccl_available
    c10d.is_nccl_available = lambda: True
    try:
        activation.activate()
        init(rank, world_size, "nccl")
        default = c10d._get_default_group()
        group = dist.new_group(backend="nccl", pg_options=object(), group_desc="tensor parallel")
        found: list[Any] = [names(), names(group), names(dist.new_group())]
        found.append([device.type for device in default._device_types])
        found.append(names(dist.new_group(backend="gloo")))
        found.append(c10d._get_object_coll_device(group))
        assert default._has_hooks() is False  # torch finds the group's default backend
        return found
    finally:
        c10d.is_nccl_available = original


def test_nccl_becomes_ours_for_cuda_only() -> None:
    ours = ("nccl", {"cuda": "deepytorch"})
    for found in spawn_ranks(rewrite_of_nccl, 2):
        assert found == [ours, ours, ours, ["cuda"], GLOO, "cuda"]


def stock_nccl_error(rank: int, world_size: int) -> str:
    original = c10d.is_nccl_available
    c10d.is_nccl_available = lambda: False
    activation.activate()
    try:
        init(rank, world_size, "nccl")
    except RuntimeError as error:
        return str(error)
    finally:
        c10d.is_nccl_available = original
    return "no error"


def test_without_nccl_the_error_is_torchs_own() -> None:
    found = spawn_ranks(stock_nccl_error, 1)
    assert re.search("NCCL built in", found[0])


def ddp_losses(rank: int, world_size: int, *, accelerated: bool) -> list[float]:
    if accelerated:
        activation.activate()
    init(rank, world_size, "gloo")
    torch.manual_seed(1)
    layers = (torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(5):
        loss = model(torch.randn(4, 8, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same_on_all_ranks(torch.cat([p.flatten() for p in model.parameters()]), "parameters")
    if accelerated:
        assert c10d_patches.is_ours(c10d, c10d._get_default_group())
        assert native_calls() > 0
    return losses


def test_ddp_trains_as_on_stock_gloo() -> None:
    stock = spawn_ranks(ddp_losses, 2, accelerated=False)
    ours = spawn_ranks(ddp_losses, 2, accelerated=True)
    for of_stock, of_ours in zip(stock, ours, strict=True):
        assert of_ours == pytest.approx(of_stock, abs=1e-6)
