"""Option `deterministic`: processes that start anew give the same bits, and measure nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import deepytorch
from deepytorch_core import _core
from deepytorch_core.testing import rank_store, spawn_ranks

SIZES = (1, 777, 30_011, 400_003)
"""Numbers of elements, from a message that goes in one piece to one that is cut up."""


def compute(
    rank: int, world_size: int, options: dict[str, Any]
) -> tuple[dict[str, bytes], set[str]]:
    """The bits of sums and of a training, whose last digits tell the order of additions."""
    deepytorch.activate(**options)
    dist.init_process_group("gloo", store=rank_store("job"), rank=rank, world_size=world_size)
    found = {}
    generator = torch.Generator().manual_seed(rank)
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            mine = torch.randn(size, generator=generator).mul_(10.0**rank).to(dtype)
            dist.all_reduce(mine)
            found[f"all_reduce of {size} {dtype}"] = bits(mine)
        part = torch.empty(size)
        whole = torch.randn(size * world_size, generator=generator)
        dist.reduce_scatter_tensor(part, whole)
        found[f"reduce_scatter of {size}"] = bits(part)
    torch.manual_seed(0)
    layers = (torch.nn.Linear(61, 257), torch.nn.GELU(), torch.nn.Linear(257, 61))
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(12):
        loss = (model(torch.randn(8, 61, generator=generator)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        found[name] = bits(parameter.detach())
    return found, {str(plan["source"]).partition(" ")[0] for plan in _core.plans()}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def test_processes_with_the_same_profile_give_the_same_bits(tmp_path: Path) -> None:
    given = {"profile": str(tmp_path / "profile.json"), "tune": "auto", "log": "error"}
    runs = [
        spawn_ranks(compute, 3, {**given, "deterministic": repeatable}, fresh=True)
        for repeatable in (False, True, True)
    ]
    _, once, again = runs
    assert "measured" in runs[0][0][1]
    for rank in range(3):
        assert "measured" not in once[rank][1] | again[rank][1]
        assert once[rank][0].keys() == again[rank][0].keys()
        differing = [name for name, value in once[rank][0].items() if value != again[rank][0][name]]
        assert not differing
    assert all(run[0][0]["module.0.weight"] == run[2][0]["module.0.weight"] for run in runs)
