"""Ranks measure by themselves, so what would have replicas step in two ways is not for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepytorch_core import guard
from deepytorch_core.nn import kernels
from deepytorch_core.testing import spawn_ranks

PREFERRED = {0: "fused", 1: "stock"}


def train(rank: int, world_size: int, mode: str) -> tuple[dict[str, str], list[float]]:
    """Each rank finds another optimizer faster; returns what is swapped, and the weights then."""

    def choose(what: str, candidates: list[Any], *args: Any, **kwargs: Any) -> Any:
        return guard.Decision(what=what, chosen=PREFERRED[rank], reason="")

    kernels.guard.choose = choose
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(33, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    setting = kernels.KernelSetting(
        model=model, optimizers=[optimizer], device=torch.device("cpu"), autocast=None
    )
    swapped = kernels.apply_kernels(setting, mode)
    torch.manual_seed(rank)
    for _ in range(60):
        model(torch.randn(8, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return swapped.names, torch.cat(
        [parameter.detach().flatten() for parameter in model.parameters()]
    ).tolist()


@pytest.mark.parametrize(("mode", "names"), [("auto", {}), ("on", {"AdamW": "fused"})])
def test_replicas_stay_equal_bit_for_bit(mode: str, names: dict[str, str]) -> None:
    (first, weights), (second, others) = spawn_ranks(train, 2, mode, backend="gloo", fresh=True)
    assert first == second == names
    assert weights == others
