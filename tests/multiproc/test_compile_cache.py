"""The next run finds what the last has decided, and what it has compiled for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.base import decisions
from deepytorch_core.compile.life import step_count
from deepytorch_core.testing import spawn_ranks


class Clock:
    """Steps take half as long where they are compiled."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def run(rank: int, world_size: int) -> dict[str, Any]:
    """A training of 26 steps, in a process of its own."""
    step_count.time = clock = Clock()  # type: ignore[assignment]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.Linear(11, 3))
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ways = []
    for _ in range(26):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ways.append(found.is_on)
        clock.now += 0.5 if found.is_on else 1.0
    made = decisions.made()[-1]
    return {
        "decided": (made["chosen"], made["reason"]),
        "is_first_compiled": ways[0],
        "caches": {
            name: count
            for name, count in counters["aot_autograd"].items()
            if name.startswith("autograd_cache_") and name.endswith(("hit", "miss"))
        },
    }


@pytest.mark.extended
@pytest.mark.timeout(500)
def test_compile_decision_and_code_are_found_by_the_next_run(tmp_path: Path) -> None:
    environment = {
        "DEEPYTORCH_PATIENCE": "off",
        "DEEPYTORCH_TUNE": "auto",
        "DEEPYTORCH_PROFILE": str(tmp_path / "profile.json"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    first, second = (
        spawn_ranks(run, 1, env=environment, fresh=True, timeout_s=240)[0] for _ in range(2)
    )
    assert first["decided"] == ("inductor", "faster than eager")
    assert not first["is_first_compiled"]
    assert first["caches"].get("autograd_cache_miss", 0) >= 1
    assert second["decided"] == ("inductor", "from the profile")
    assert second["is_first_compiled"]
    assert second["caches"].get("autograd_cache_hit", 0) >= 1
    assert not second["caches"].get("autograd_cache_miss")
