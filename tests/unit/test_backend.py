"""Tests of torch's call for a backend: timeouts, options of others, the stock delegates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deepytorch_core.base import config
from deepytorch_core.base.errors import AdapterError
from deepytorch_core.c10d import activation, adapter, backend, delegates
from deepytorch_core.c10d.delegates import GroupSpec, StockFactory
from deepytorch_core.network import gloo_env


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    activation.deactivate()
    config.set_current(None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of every create_backend, in order."""
    module = adapter.load()
    create = module.create_backend
    seen: list[dict[str, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return create(*args, **kwargs)

    monkeypatch.setattr(module, "create_backend", recorded)
    return seen


def init(name: str | None, **kwargs: Any) -> None:
    backend.register()
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, **kwargs)


def test_registering_twice_is_once() -> None:
    backend.register()
    plugin = c10d.Backend._plugins["DEEPYTORCH"]
    backend.register()
    assert c10d.Backend._plugins["DEEPYTORCH"] is plugin
    assert c10d.Backend.backend_list.count("deepytorch") == 1


def test_a_child_of_a_process_that_had_groups_is_told_to_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "_had_groups", os.getppid())
    with pytest.raises(AdapterError, match=r"group 0: this process was made by fork\(\) .*ENABLED"):
        init("deepytorch")


def test_timeout_s_replaces_the_default_of_an_explicit_name(calls: list[dict[str, Any]]) -> None:
    config.set_current(config.Options(timeout_s=77))
    init("deepytorch")
    dist.new_group([0])
    dist.new_group([0], timeout=timedelta(seconds=5))
    assert [call["timeout"].total_seconds() for call in calls] == [77, 77, 5]


@pytest.mark.parametrize("name", ["gloo", None, "deepytorch"])
def test_an_explicit_timeout_wins_even_if_it_equals_the_default(
    calls: list[dict[str, Any]], name: str | None
) -> None:
    activation.activate(timeout_s=77)
    equal = timedelta(seconds=c10d.default_pg_timeout.total_seconds())
    init(name, timeout=equal)
    dist.new_group([0])
    dist.new_group([0], timeout=equal)
    assert [call["timeout"] for call in calls] == [equal, timedelta(seconds=77), equal]


def test_the_group_is_described_to_the_adapter(calls: list[dict[str, Any]]) -> None:
    init("deepytorch")
    (call,) = calls
    assert call["group_name"] == "0"
    assert call["global_ranks"] == [0]
    assert call["native"] is True


def test_options_of_other_backends_are_tolerated(calls: list[dict[str, Any]]) -> None:
    activation.activate()
    init("gloo", pg_options=object())
    group = dist.new_group([0], pg_options={"anything": 1}, group_desc="mine")
    dist.all_reduce(torch.ones(1), group=group)
    assert group.group_desc == "mine"
    own = adapter.load().Options(timeout=timedelta(seconds=9))
    dist.new_group([0], backend="deepytorch", pg_options=own)
    assert len(calls) == 3


def spec(**changes: Any) -> GroupSpec:
    values: dict[str, Any] = {
        "store": dist.HashStore(),
        "rank": 0,
        "size": 1,
        "timeout": timedelta(seconds=30),
        "name": "some_group",
        "global_ranks": [0],
    }
    return GroupSpec(**(values | changes))


def test_the_cpu_delegate_is_gloo_as_torch_makes_it() -> None:
    factory = StockFactory(spec())
    made: Any = factory("cpu")
    assert isinstance(made, dist.ProcessGroupGloo)
    assert made.options._timeout == timedelta(seconds=30)
    assert made.options.group_name == "some_group"
    assert made.options.global_ranks_in_group == [0]
    assert made in delegates.live("cpu")


def test_a_delegate_made_later_takes_the_timeout_set_meanwhile() -> None:
    factory = StockFactory(spec())
    factory.live_options = dist.ProcessGroupGloo._Options()
    factory.live_options._timeout = timedelta(seconds=4)
    made: Any = factory("cpu")
    assert made.options._timeout == timedelta(seconds=4)


@pytest.mark.parametrize("nodes", [1, 2])
def test_between_nodes_gloos_failed_start_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    def fail(self: StockFactory, *args: Any) -> None:
        raise RuntimeError("connectFullMesh failed")

    monkeypatch.setattr(config, "spans_nodes", lambda: nodes > 1)
    monkeypatch.setattr(gloo_env, "before_gloo", lambda: None)
    monkeypatch.setattr(StockFactory, "_gloo", fail)
    monkeypatch.setattr(StockFactory, "_from_registry", fail)
    found = "GLOO_SOCKET_IFNAME.*gloo: connectFullMesh" if nodes > 1 else "^connectFullMesh"
    with pytest.raises(RuntimeError, match=found):
        StockFactory(spec())("cpu")


def test_a_device_without_stock_backend_is_named() -> None:
    with pytest.raises(RuntimeError, match="group some_group: no backend for tensors on meta"):
        StockFactory(spec())("meta")


def test_cuda_tensors_without_nccl_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: False)
    with pytest.raises(RuntimeError, match="built without NCCL"):
        StockFactory(spec())("cuda")


def test_spec_reads_old_and_new_records_of_torch() -> None:
    class Old:
        store = None
        group_rank = 1
        group_size = 2
        group_id = "7"
        global_ranks_in_group: tuple[int, ...] = (4, 5)

    read = GroupSpec.of(Old(), None, timeout=timedelta(seconds=1))
    assert (read.rank, read.size, read.name, read.global_ranks) == (1, 2, "7", [4, 5])
    assert read.process_group is None

    class New(Old):
        process_group = type("Group", (), {})()
        split_from = None

    kept = GroupSpec.of(New(), None, timeout=timedelta(seconds=1)).process_group
    assert kept is not None
    assert kept() is New.process_group
