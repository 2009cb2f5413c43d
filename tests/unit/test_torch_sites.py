"""The table of sites and its document; and what needs NCCL, with a stand-in for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepytorch
from deepytorch_core.base.patching import Patches
from deepytorch_core.c10d import backend_checks, delegates, sites
from deepytorch_core.testing import rank_store, spawn_ranks

ROOT = Path(__file__).parents[2]


def test_the_document_is_made_from_the_table() -> None:
    assert (ROOT / "docs" / "backend-sites.md").read_text() == sites.markdown()


def test_every_test_named_in_the_table_exists() -> None:
    for site in sites.SITES:
        if site.test:
            path, name = site.test.split("::")
            assert f"def {name}(" in (ROOT / path).read_text(), site


def test_every_site_in_torch_exists() -> None:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch_folder = Path(found.origin).parent
    for site in sites.TORCH:
        for place in site.where.split(", "):
            path = place.split(":")[0].split(" ")[0]
            if path.endswith(".py") and "/" in path:
                base = torch_folder / "distributed/_shard/sharded_tensor"
                assert (torch_folder / path).is_file() or (base / path).is_file(), place


def test_every_remedy_that_replaces_is_there() -> None:
    replaced = [site.where for site in sites.TORCH if site.remedy.startswith("replaced")]
    source = (ROOT / "deepytorch_core/c10d/backend_checks.py").read_text()
    source += (ROOT / "deepytorch_core/c10d/patches.py").read_text()
    for where in replaced:
        name = where.split(":")[1].split(".")[0]
        if name != "_get_default_timeout":
            assert name in source, where


class Nccl:
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        self.calls.append(timeout)

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    stand_in = Nccl()
    live: Callable[[str], list[Any]] = {"cuda": [stand_in], "cpu": []}.__getitem__
    monkeypatch.setattr(delegates, "live", live)
    return stand_in


def c10d_with(**functions: Callable[..., Any]) -> Any:
    return SimpleNamespace(GroupMember=SimpleNamespace(WORLD="world"), **functions)


def test_ephemeral_timeouts_reach_nccl_delegates(nccl: Nccl) -> None:
    seen: list[timedelta] = []
    c10d = c10d_with(_add_ephemeral_timeout_for_all_pgs=seen.append)
    backend_checks.install(c10d, Patches())
    c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=9))
    assert seen == nccl.calls == [timedelta(seconds=9)]


def test_abort_opens_one_nccl_group(nccl: Nccl) -> None:
    def abort(group: Any = None) -> None:
        nccl.calls.append(("abort", group))
        if group == "fails":
            raise RuntimeError

    c10d = c10d_with(_abort_process_group=abort)
    backend_checks.install(c10d, Patches())
    c10d._abort_process_group()
    assert nccl.calls == ["start", ("abort", None), "end"]
    nccl.calls.clear()
    c10d._abort_process_group("a sub-group")
    assert nccl.calls == [("abort", "a sub-group")]


def split_around_a_pause(rank: int, world_size: int) -> list[Any]:
    store = rank_store("split")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found: list[Any] = []
    groups = []  # the first lives on
    for _ in range(2):
        deepytorch.activate()
        groups.append(dist.split_group(split_ranks=[list(range(world_size))]))
        value = torch.ones(1)
        dist.all_reduce(value, group=groups[-1])
        found += [value.item(), groups[-1].group_name]
        deepytorch.deactivate()
    return found


def test_groups_split_before_and_after_a_pause_have_names_of_their_own() -> None:
    first, other = spawn_ranks(split_around_a_pause, 2, timeout_s=30)
    assert first == other
    assert first[0::2] == [2, 2]
    assert first[1] != first[3]


def test_newer_torch_that_asks_every_backend_is_left_alone() -> None:
    original = print
    c10d = c10d_with(_set_pg_timeout=original, set_timeout=original)
    backend_checks.install(c10d, Patches())
    assert c10d._set_pg_timeout is original
