"""Frameworks in scripts that know nothing of deepytorch: no rank waits, and nothing raises."""

from __future__ import annotations

import contextlib
import io
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepytorch
from deepytorch_core.c10d import activation
from deepytorch_core.testing import spawn_ranks

pytest.importorskip("accelerate")

# Ranks that wait for each other in an adapter take as long as the group's time limit.
LIMIT_S = 50.0


def switch_on(folder: str) -> None:
    activation.leave_models_alone(False)
    deepytorch.activate(tune="auto", profile=f"{folder}/profile.json")


def a_step(accelerator: Any, prepared: nn.Module, optimizer: Any) -> float:
    loss = prepared(torch.ones(2, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def accelerator_of_one_rank(rank: int, folder: str) -> bool:
    from accelerate import Accelerator

    if rank == 0:
        accelerator = Accelerator(cpu=True)
        net = nn.Linear(4, 1)
        optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
        return all(a_step(accelerator, net, optimizer) >= 0 for _ in range(5))
    return True


def prepared_by_one_rank(rank: int, folder: str) -> bool:
    """The main process alone prepares a judge, and an Accelerator more."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = nn.Linear(4, 1)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if accelerator.is_main_process:
        accelerator.prepare_model(nn.Linear(4, 4), evaluation_mode=True)
        accelerator.prepare(torch.optim.AdamW([nn.Parameter(torch.ones(3))]))
        Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    return all(a_step(accelerator, net, optimizer) >= 0 for _ in range(5))


def engine_of_one_rank(rank: int, folder: str) -> bool:
    """A DeepSpeed engine whose data-parallel group is rank 0."""
    deepspeed = pytest.importorskip("deepspeed")
    groups = [dist.new_group([member]) for member in range(2)]

    class Mpu:
        get_model_parallel_rank = get_data_parallel_rank = lambda self: 0
        get_model_parallel_world_size = get_data_parallel_world_size = lambda self: 1
        get_model_parallel_group = get_data_parallel_group = lambda self: groups[rank]

    if rank == 0:
        net = nn.Linear(4, 1)
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        engine, *_ = deepspeed.initialize(
            model=net, model_parameters=net.parameters(), config=settings, mpu=Mpu()
        )
        for _ in range(5):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
    return True


def run(rank: int, world_size: int, folder: str, name: str) -> bool:
    switch_on(folder)
    found = bool(ACTS[name](rank, folder))
    dist.barrier()
    return found


ACTS: dict[str, Any] = {
    act.__name__: act for act in (accelerator_of_one_rank, prepared_by_one_rank, engine_of_one_rank)
}


@pytest.mark.parametrize("name", ACTS)
def test_what_one_rank_makes_waits_for_no_other(name: str, tmp_path: Path) -> None:
    ranks = spawn_ranks(run, 2, str(tmp_path), name, backend="gloo", fresh=True, timeout_s=LIMIT_S)
    assert ranks == [True, True]


def with_a_broken_configuration(rank: int, world_size: int, folder: str) -> list[str]:
    deepspeed = pytest.importorskip("deepspeed")
    said = []
    for arm in ("stock", "ours"):
        if arm == "ours":
            switch_on(folder)
        try:
            deepspeed.initialize(model=nn.Linear(4, 1), config="no such file")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_broken_configuration_is_deepspeeds_error(tmp_path: Path) -> None:
    ((stock, ours),) = spawn_ranks(
        with_a_broken_configuration, 1, str(tmp_path), backend="gloo", fresh=True, timeout_s=LIMIT_S
    )
    assert ours == stock


def of_an_unknown_version(rank: int, world_size: int, folder: str) -> tuple[list[float], str]:
    real = metadata.version
    metadata.version = lambda name: "0.1" if name == "accelerate" else real(name)
    switch_on(folder)
    from accelerate import Accelerator

    with contextlib.redirect_stderr(io.StringIO()) as told:
        for _ in range(2):
            accelerator = Accelerator(cpu=True)
        net = nn.Linear(4, 1)
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        return [a_step(accelerator, net, optimizer) for _ in range(3)], told.getvalue()


def test_a_version_that_is_not_known_means_stock_and_a_line(tmp_path: Path) -> None:
    ((losses, told),) = spawn_ranks(
        of_an_unknown_version, 1, str(tmp_path), fresh=True, timeout_s=LIMIT_S
    )
    assert losses[-1] < losses[0]
    assert told.count("Accelerate's prepare stays as it is: IntegrationError: accelerate 0.1") == 1
