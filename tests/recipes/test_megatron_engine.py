"""engine=megatron updates weights as DDP does, over gloo's groups and ours, and resumes exactly.

Megatron trains on GPUs only; `megatron_on_cpu` stands in for them, in workers of its own.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepytorch_core.testing import rank_store, spawn_ranks

ON_CPU = Path(__file__).parents[1] / "integrations" / "megatron_on_cpu.py"
# The list is that of test_megatron.py: ranks of both are forks of one process.
PRELOAD = (str(ON_CPU.with_name("megatron_preloaded.py")),)
STEPS, SAVED_AFTER = 6, 3
TIED = 17


class Net(nn.Module):
    """Odd sizes, a weight that is used twice, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, TIED)
        self.norm = nn.LayerNorm(TIED)
        self.middle = nn.Linear(TIED, TIED)
        self.fixed = nn.Linear(TIED, TIED).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.fixed(torch.tanh(self.middle(self.norm(self.embedding(tokens)))))
        return hidden @ self.embedding.weight.T


def options(backend: str, engine: str) -> Any:
    from deepytorch.recipes.base.options import RunOptions

    return RunOptions(name="test", backend=backend, engine=engine, max_grad_norm=0.5)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def train(rank: int, world_size: int, engine_name: str, backend: str, folder: str) -> Any:
    """Losses and the weights at the end; of the last steps alone where `folder` has a part."""
    runpy.run_path(str(ON_CPU))["install"]()
    from megatron.core import parallel_state

    import deepytorch
    from deepytorch.integrations.common import contract
    from deepytorch.recipes.models import megatron
    from deepytorch.recipes.runner.engines import start_engine

    deepytorch.deactivate()
    megatron.refuse_without_gpu = lambda process: None
    dist.init_process_group("gloo", store=rank_store("world"), rank=rank, world_size=world_size)
    process: Any = SimpleNamespace(device=torch.device("cpu"), rank=rank, world_size=world_size)
    torch.manual_seed(3)
    engine = start_engine(Net(), make_optimizer, options(backend, engine_name), process)
    begin = 0
    if Path(folder, "state.pt").exists():
        engine.load(Path(folder), rank, world_size)
        begin = SAVED_AFTER
    losses = []
    for step in range(begin, STEPS):
        for part in range(2):
            chance = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            tokens = torch.randint(0, 13, (3, 5), generator=chance)
            with engine.accumulating(last=part == 1):
                scores = engine.wrapped(tokens).flatten(0, 1)
                loss = nn.functional.cross_entropy(scores, tokens.flatten())
                engine.backward(loss / 2)
            losses.append(loss.item())
        engine.step()
        if folder and begin == 0 and step + 1 == SAVED_AFTER:
            engine.save(Path(folder), rank)
            dist.barrier()
    state = {name: value.clone() for name, value in engine.model.state_dict().items()}
    full = engine.full_state()
    assert full.keys() == (state.keys() if rank == 0 or engine_name == "ddp" else set())
    native = deepytorch.report().native_calls
    if backend == "deepytorch" and engine_name == "megatron":
        contract.undo(parallel_state, "megatron")
    parallel_state.destroy_model_parallel()
    return losses, state, native


def ranks(*arguments: Any) -> list[Any]:
    told = spawn_ranks(train, 2, *arguments, preload=PRELOAD, fresh=True, timeout_s=90)
    for name, value in told[0][1].items():
        assert torch.equal(value, told[1][1][name]), f"{name} differs between ranks"
    return told


@pytest.mark.parametrize("backend", ["stock", "deepytorch"])
def test_weights_are_those_of_ddp(backend: str) -> None:
    expected = ranks("ddp", "stock", "")
    found = ranks("megatron", backend, "")
    for rank in range(2):
        assert found[rank][0] == pytest.approx(expected[rank][0], rel=1e-5)
    for name, value in expected[0][1].items():
        torch.testing.assert_close(found[0][1][name], value, atol=2e-5, rtol=1e-4)
    assert (found[0][2] > 0) == (backend == "deepytorch")


def test_a_resumed_run_repeats_the_unbroken_one(tmp_path: Path) -> None:
    unbroken = ranks("megatron", "deepytorch", str(tmp_path))
    resumed = ranks("megatron", "deepytorch", str(tmp_path))
    for rank in range(2):
        assert resumed[rank][0] == unbroken[rank][0][2 * SAVED_AFTER :]
    for name, value in unbroken[0][1].items():
        assert torch.equal(resumed[0][1][name], value)


def test_without_a_gpu_it_says_so() -> None:
    from deepytorch.recipes.base.config import RecipeError
    from deepytorch.recipes.models import megatron

    process: Any = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(RecipeError, match="engine=megatron needs a GPU: use engine=ddp"):
        megatron.refuse_without_gpu(process)
