"""The guard over several ranks: each decides for itself, or all come to one decision."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepytorch_core import guard
from deepytorch_core.guard import Candidate, Trial
from deepytorch_core.testing import spawn_ranks


def choose(rank: int, world_size: int, together: bool) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    inputs = torch.randn(2, 4)
    wait_s = {"stock": [0.004, 0.004], "uneven": [0.0, 0.03], "even": [0.001, 0.002]}
    in_use = "stock"

    def use(name: str) -> Any:
        def apply() -> None:
            nonlocal in_use
            if name == "failing" and rank == 1:
                raise RuntimeError("only here")
            in_use = name

        return apply

    def run() -> torch.Tensor:
        time.sleep(wait_s.get(in_use, [0, 0])[rank])
        output = model(inputs)
        output.sum().backward()
        return output

    def candidate(name: str) -> Candidate:
        return Candidate(name, use(name), use("stock"))

    found = []
    for names in (["uneven"], ["failing", "even"], ["failing"]):
        candidates = [candidate(name) for name in names]
        trial = Trial(module=model, run=run)
        decision = guard.choose("-".join(names), candidates, trial, together=together)
        found.append((decision.chosen, decision.dropped.get("failing", decision.reason)))
    return found


def test_guard_ranks_decide_alike(tmp_path: Path) -> None:
    environment = {
        "DEEPYTORCH_PROFILE": str(tmp_path / "profile.json"),
        "DEEPYTORCH_TUNE": "auto",
        "DEEPYTORCH_LOG": "error",
    }
    both = spawn_ranks(choose, 2, True, backend="gloo", env=environment)
    failed = "rank 1: RuntimeError: only here"
    # A candidate that is fast on one rank and slow on the other is slow.
    assert both == [[("stock", "nothing is faster"), ("even", failed), ("stock", failed)]] * 2


def choose_unlike(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Rank 1 goes elsewhere at first, and comes to nothing that rank 0 does."""
    if rank == 1:
        dist.barrier()
    found = choose(rank, world_size, together=False)
    if rank == 0:
        dist.barrier()
    return found


def test_guard_a_rank_decides_for_itself_and_waits_for_none(tmp_path: Path) -> None:
    environment = {
        "DEEPYTORCH_PROFILE": str(tmp_path / "profile.json"),
        "DEEPYTORCH_TUNE": "force",
        "DEEPYTORCH_LOG": "error",
    }
    first, second = spawn_ranks(choose_unlike, 2, backend="gloo", env=environment)
    faster, failed = "faster than stock", "RuntimeError: only here"
    assert [chosen for chosen, _ in first] == ["uneven", "failing", "failing"]
    assert second == [("stock", "nothing is faster"), ("even", failed), ("stock", failed)]
    assert first[0] == ("uneven", faster)


def gather_alone(rank: int, world_size: int) -> str:
    ranks = guard.Ranks("nobody else", limit_s=0.3)
    if rank == 1:
        time.sleep(1.0)
    try:
        ranks.gather(rank)
    except RuntimeError as error:
        return str(error)
    return "all came"


def test_guard_rank_that_is_late_is_named_on_all() -> None:
    said = spawn_ranks(gather_alone, 2, backend="gloo")
    assert said == ["rank 1 did not come within 0.3 s"] * 2
