"""`import deepytorch` over NCCL: groups are ours; CUDA tensors and NCCL's own calls work."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from deepytorch_core.c10d import activation
from deepytorch_core.c10d import patches as c10d_patches
from deepytorch_core.testing import needs_gpus, rank_store, spawn_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(2)]


def _total(group: dist.ProcessGroup | None = None) -> float:
    value = torch.ones(4, device=f"cuda:{torch.cuda.current_device()}")
    dist.all_reduce(value, group=group)
    return value[0].item()


def _groups(rank: int, world_size: int, backend: str | None, *, when: str) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    if when == "before":
        activation.activate()
    dist.init_process_group(
        backend,
        store=rank_store("world"),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank) if when == "before" and backend else None,
    )
    if when == "after":
        _total()
        activation.activate()
    everyone = list(range(world_size))
    group = dist.new_group(everyone, pg_options=dist.ProcessGroupNCCL.Options(), group_desc="tp")
    # With a device_id torch splits the default group for this.
    mesh = init_device_mesh("cuda", (1, world_size), mesh_dim_names=("one", "all"))
    dist.barrier()
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, rank)
    c10d._set_pg_timeout(timedelta(seconds=50))
    c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    groups = (None, group, mesh.get_group("all"))
    found: dict[str, Any] = {
        "names": [dist.get_backend(g) for g in groups],
        "type": c10d._get_default_group().name(),
        "of cuda": [g._get_backend(torch.device("cuda")).name() for g in (group, groups[2])],
        "served": c10d_patches.served(c10d, c10d._get_default_group()),
        "totals": [_total(g) for g in groups],
        "objects": objects,
    }
    if when == "after":
        activation.deactivate()
        found["names"].append(dist.get_backend())
        found["totals"].append(_total())
    c10d._abort_process_group()
    found["initialised"] = dist.is_initialized()
    return found


@pytest.mark.parametrize(
    ("backend", "devices"),
    [("nccl", ["cuda"]), (None, ["cuda"]), ("cpu:gloo,cuda:nccl", ["cpu", "cuda"])],
)
def test_groups_made_after_the_import(backend: str | None, devices: list[str]) -> None:
    for found in spawn_ranks(_groups, 2, backend, when="before", fresh=True):
        assert found == {
            "names": [backend or "undefined"] * 3,
            "type": "nccl",
            "of cuda": ["nccl"] * 2,
            "served": {device: "deepytorch" for device in devices},
            "totals": [2.0] * 3,
            "objects": [0, 1],
            "initialised": False,
        }


def test_an_existing_group_is_upgraded_and_back() -> None:
    for found in spawn_ranks(_groups, 2, "nccl", when="after", fresh=True):
        assert found == {
            "names": ["nccl"] * 4,
            "type": "nccl",
            "of cuda": ["nccl"] * 2,
            "served": {"cuda": "deepytorch"},
            "totals": [2.0] * 4,
            "objects": [0, 1],
            "initialised": False,
        }
