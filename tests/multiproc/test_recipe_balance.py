# SPDX-License-Identifier: Apache-2.0
"""token_balance= of the recipes: losses are those of training without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepytorch_core.testing import spawn_ranks


def train(rank: int, world_size: int, folder: str) -> tuple[list[list[float]], list[Any], str]:
    """Loss curves of stock's batches and ours, the choices made, and what was printed."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from deepytorch.recipes import llama_sft
    from deepytorch.recipes.base.run import Process, console
    from deepytorch.recipes.runner import loop
    from deepytorch_core.base import decisions

    process = Process(rank, world_size, torch.device("cpu"))
    curves = []
    with console.capture() as captured:
        for choice in ("off", "auto"):
            config = llama_sft.Config(
                name=choice,
                output_dir=folder,
                device="cpu",
                hidden_size=32,
                intermediate_size=64,
                num_layers=1,
                num_heads=2,
                max_length=256,
                batch_size=3,
                accumulation=2,
                steps=6,
                warmup_steps=1,
                learning_rate=1e-3,
                sample_tokens=2,
                token_balance=choice,
            )
            loop.train("llama_sft", llama_sft.prepare(config, process), config, process)
            if rank == 0:
                (path,) = Path(folder).glob(f"{choice}-*/tensorboard")
                events = EventAccumulator(str(path)).Reload()
                curves.append([event.value for event in events.Scalars("train/loss")])
    made = [decision for decision in decisions.made() if decision["what"] == "token balance"]
    return curves, made, captured.get()


@pytest.mark.extended
def test_token_balance_of_a_recipe_leaves_its_losses(tmp_path: Path) -> None:
    first, second = spawn_ranks(train, 2, str(tmp_path), backend="gloo", fresh=True, timeout_s=110)
    (off, ours), made, printed = first
    assert len(off) == 6
    assert off[-1] < off[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(off), rtol=1e-4, atol=1e-5)
    assert made == second[1]
    assert [(decision["chosen"]) for decision in made] == ["off", "on"]
    assert made[0]["reason"] == "token_balance=off"
    reported = " ".join(printed.split())
    assert f"balance {made[1]['reason']}" in reported
    before, after = (
        float(part.split()[0]) for part in made[1]["reason"].partition("has ")[2].split("and ")
    )
    assert 1 <= after < before
