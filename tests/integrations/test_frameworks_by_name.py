"""Frameworks that decide by the backend's name whether and how they distribute a model.

pytorch-ignite leaves a model without DistributedDataParallel where it doesn't know the name, and
Composer refuses to start: either would train apart or not at all.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepytorch_core.testing import run_script

# `make venv` puts them there, apart from what they would bring along.
TRAINERS = Path(sys.prefix) / "trainers"
VISION = Path(sys.prefix) / "vision"

BEGIN = """
import sys
sys.path += sys.argv[1:]
import torch
import torch.distributed as dist
"""

END = """
train()
if dist.is_initialized():
    dist.destroy_process_group()
import deepytorch
train()
assert deepytorch.report().native_calls > 0
"""

TELL = """
def tell(model):
    total = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    print(type(model).__name__, dist.get_backend(), f"{total:.9f}", flush=True)
"""

IGNITE = """
import ignite.distributed as idist
from ignite.engine import create_supervised_trainer

def on_each_rank(_):
    torch.manual_seed(idist.get_rank())
    model = idist.auto_model(torch.nn.Linear(4, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    loader = idist.auto_dataloader(data, batch_size=8)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    trainer.run(loader, max_epochs=2)
    assert idist.all_reduce(1.0) == 2
    assert idist.all_gather("rank") == ["rank"] * 2
    tell(model)

def train():
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(on_each_rank)
"""

NEEDS = Path(__file__).parents[1] / "scripts" / "composer_needs.py"
COMPOSER = """
from composer import Trainer
from composer.models import ComposerClassifier
from composer.utils import dist as composer_dist

def train():
    torch.manual_seed(0)
    values = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(values, (values.sum(1) > 0).long())
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    model = ComposerClassifier(network, num_classes=2)
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(
            data, batch_size=8, sampler=composer_dist.get_sampler(data, shuffle=True)
        ),
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress_bar=False,
        seed=1,
    )
    trainer.fit()
    tell(trainer.state.model)
    trainer.close()
"""


@pytest.mark.parametrize(
    "program", [IGNITE, NEEDS.read_text() + COMPOSER], ids=["ignite", "composer"]
)
def test_it_distributes_and_trains_as_on_stock(program: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEGIN + TELL + program + END)
    printed, _ = run_script(script, TRAINERS, VISION, timeout_s=150)
    stock, *others = printed.splitlines()
    assert stock.startswith("DistributedDataParallel gloo ")
    assert others == [stock] * 3  # stock's other rank, and ours
