"""Time limits are torch's own unless somebody gave another; none is too long or too short."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deepytorch_core import _core
from deepytorch_core.base import config
from deepytorch_core.c10d import activation, backend, upgrade
from deepytorch_core.c10d import patches as c10d_patches

GLOOS = c10d.default_pg_timeout
CPU = torch.device("cpu")
YEAR = timedelta(days=365)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    activation.deactivate()
    config.set_current(None)


def init(name: str | None, **kwargs: Any) -> None:
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, **kwargs)


def limit(group: Any = None) -> timedelta:
    """Return the time limit that the group's backend goes by."""
    group = c10d._get_default_group() if group is None else group
    found: timedelta = group._get_backend(CPU).options._timeout
    return found


def is_longest(found: timedelta) -> bool:
    """Return whether it is a century, which C++ may give back some minutes off."""
    return abs(found - backend.LONGEST) < timedelta(hours=1)


@pytest.mark.parametrize("name", ["gloo", None, "cpu:gloo"])
def test_without_a_limit_it_is_torchs(name: str | None) -> None:
    init(name)
    stock = [limit(), limit(dist.new_group([0])), limit(dist.new_group([0], backend=name))]
    dist.destroy_process_group()
    activation.activate()
    init(name)
    assert c10d_patches.serving_name() == "deepytorch"
    ours = [limit(), limit(dist.new_group([0])), limit(dist.new_group([0], backend=name))]
    assert ours == stock == [GLOOS] * 3


def test_an_explicit_name_has_torchs_limit_too() -> None:
    backend.register()
    init("deepytorch")
    assert limit() == limit(dist.new_group([0])) == GLOOS


def test_groups_that_were_there_before_keep_theirs() -> None:
    init("gloo", timeout=timedelta(seconds=70))
    default = dist.new_group([0])
    activation.activate()
    assert c10d_patches.is_ours(c10d, default)
    assert (limit(), limit(default)) == (timedelta(seconds=70), GLOOS)


def test_of_several_backends_the_longest_limit_counts() -> None:
    limits = [timedelta(minutes=10), None, timedelta(minutes=30)]
    assert backend.longest(limits) == timedelta(minutes=30)
    assert backend.longest([None]) == GLOOS
    assert upgrade.longest is backend.longest


def test_a_split_group_has_torchs_limit() -> None:
    activation.activate()
    init("gloo", timeout=timedelta(seconds=70))
    whole = c10d._get_default_group()
    made = [
        dist.split_group(split_ranks=[[0]]),
        dist.split_group(parent_pg=whole, split_ranks=[[0]], timeout=timedelta(seconds=8)),
    ]
    assert [limit(group) for group in made] == [GLOOS, timedelta(seconds=8)]


def test_timeout_s_replaces_torchs_limit_and_no_other() -> None:
    activation.activate(timeout_s=77)
    init("gloo")
    given = dist.new_group([0], timeout=timedelta(seconds=5))
    split = dist.split_group(split_ranks=[[0]])
    assert [limit(group).total_seconds() for group in (None, given, split)] == [77, 5, 77]


@pytest.mark.parametrize("timeout_s", ["1e300", 1e18])
def test_an_endless_timeout_s_is_one_that_can_be_counted(timeout_s: Any) -> None:
    activation.activate(timeout_s=timeout_s)
    init("gloo")
    assert is_longest(limit())
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("long", [timedelta.max, 300 * YEAR, 290_000 * YEAR, backend.LONGEST])
def test_a_limit_that_would_overflow_is_the_longest_there_is(long: timedelta) -> None:
    activation.activate()
    init("gloo", timeout=long)
    groups = [None, dist.new_group([0], timeout=long)]
    assert all(is_longest(limit(group)) for group in groups)
    c10d._set_pg_timeout(timedelta(seconds=9))
    assert limit() == timedelta(seconds=9)
    c10d._set_pg_timeout(long)
    assert is_longest(limit())
    dist.monitored_barrier(timeout=long)
    assert dist.all_reduce(torch.ones(1), async_op=True).wait(min(long, 290_000 * YEAR))


class Store:
    """A group of one rank asks nothing."""

    def set(self, key: str, value: bytes) -> None:
        raise AssertionError(key)

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        raise AssertionError(key)


def test_so_is_that_of_a_communicator_without_torch() -> None:
    made = _core.Communicator(Store(), 0, 1, name="endless", timeout_s=1e300)
    made.all_reduce("float32", "sum", bytearray(4), bytearray(4))
    made.close()


TINY = [timedelta(0), timedelta(microseconds=300), timedelta(microseconds=-1), -YEAR]


@pytest.mark.parametrize("tiny", TINY)
def test_no_time_at_all_is_refused_where_torch_refuses_it(tiny: timedelta) -> None:
    activation.activate()
    if tiny >= timedelta(0):  # alone there is nobody to meet
        init("gloo", timeout=tiny)
        dist.all_reduce(torch.ones(1))
        return
    with pytest.raises(RuntimeError, match=r"group \d: a time limit of -.* at least 1 ms"):
        init("gloo", timeout=tiny)


@pytest.mark.parametrize("tiny", TINY)
def test_nor_is_there_with_other_ranks(tiny: timedelta) -> None:
    with pytest.raises(dist.DistBackendError, match="group dp: a time limit of .*, or none for"):
        backend._check_timeout(tiny, "dp", 2)
    backend._check_timeout(timedelta(milliseconds=1), "dp", 2)


def test_what_has_no_time_limit_of_its_own_waits_as_long_as_the_group() -> None:
    from deepytorch.integrations.common import contract

    init("gloo", timeout=timedelta(seconds=10))
    assert contract.here_limit_s() == GLOOS.total_seconds()  # that of a framework's own groups
    dist.destroy_process_group()
    init("gloo", timeout=timedelta(hours=2))
    assert contract.here_limit_s() == datetime.timedelta(hours=2).total_seconds()
