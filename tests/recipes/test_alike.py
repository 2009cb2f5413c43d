# SPDX-License-Identifier: Apache-2.0
"""Ranks train one model on one set of data, each with random numbers of its own, or none trains."""

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
import torch
from torch import nn

from deepytorch.recipes import llama_sft
from deepytorch.recipes.base import run
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.rank_consistency import digest_of, draw_apart, refuse_unlike
from deepytorch.recipes.base.run import Process
from deepytorch.recipes.runner import loop
from deepytorch.recipes.runner.task import Task
from deepytorch.recipes.runner.trainer import Trainer
from deepytorch_core.testing import spawn_ranks


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(37, 53), nn.BatchNorm1d(53), nn.Linear(53, 1, bias=False))
    module.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    module.register_buffer("none", torch.zeros(0, dtype=torch.float16))
    return module


def test_weights_of_other_files_are_told_apart() -> None:
    assert digest_of(net(1)) == digest_of(net(1)) != digest_of(net(2))
    module = net(1)
    with torch.no_grad():
        module[0].weight.copy_(module[0].weight.double() * 1.001)
    assert digest_of(module) != digest_of(net(1))
    assert digest_of(net(1).bfloat16()) != digest_of(net(1))


def _unlike(rank: int, world_size: int) -> None:
    process = Process(rank, world_size, torch.device("cpu"))
    refuse_unlike(process, weights=digest_of(net(1)), steps=7)
    with pytest.raises(
        RecipeError, match=r"^batches held out: 3 for rank 0 on .*, 4 for rank 2 on"
    ):
        refuse_unlike(process, steps=7, batches_held_out=3 + rank // 2)
    drawn = []
    for seed in (1, 2, 1):
        draw_apart(seed, process)
        drawn.append(torch.rand(()))
    own = torch.stack(drawn)
    ranks = [torch.empty(3) for _ in range(world_size)]
    torch.distributed.all_gather(ranks, own)
    assert all(torch.equal(values[0], values[2]) for values in ranks)
    assert len({value.item() for values in ranks for value in values[:2]}) == 2 * world_size


def test_ranks_have_the_same_but_for_random_numbers() -> None:
    spawn_ranks(_unlike, 3, backend="gloo")


LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK")


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 processes, which know nothing of each"),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            "mpirun started this as rank 1 of 2, without saying where they meet: start recipes",
        ),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "torchrun started this as rank 0 of 3, without saying"),
        ({"RANK": "first", "WORLD_SIZE": "3"}, "RANK='first': expected a whole number"),
    ],
)
def test_one_of_several_processes_does_not_train_as_if_alone(
    told: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert llama_sft.main(["device=cpu", "steps=1", f"output_dir={tmp_path}"]) == 2
    assert f"llama_sft: {says}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_one_process_of_a_launcher_may_be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert not run._has_others()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert not run._has_others()
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert run._has_others()


def _of_other_data(rank: int, world_size: int, folder: str, arguments: list[str]) -> str:
    data = Path(folder) / f"{rank}.json"
    texts = [{"instruction": f"say {n}", "output": "aye " * n} for n in range(1, 40 + 5 * rank)]
    data.write_text(json.dumps(texts))
    process = Process(rank, world_size, torch.device("cpu"))

    @contextmanager
    def group(backend: str, device: torch.device) -> Iterator[Process]:
        yield process

    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(errors):
        patch.setattr(loop, "distributed", group)
        words = ["device=cpu", "backend=stock", "steps=1", f"data={data}", f"output_dir={folder}"]
        assert llama_sft.main([*words, *arguments]) == 2
    return errors.getvalue()


def test_nodes_with_other_data_are_told_before_training(tmp_path: Path) -> None:
    arguments = (str(tmp_path), ["batch_size=2", "held_out=2"])
    told = spawn_ranks(_of_other_data, 2, *arguments, backend="gloo")
    assert re.search(r"examples: \d+ for rank 0 on .* for rank 1 on", told[0]), told
    assert "Give all nodes the same files and options" in told[0]


def _of_other_weights(rank: int, world_size: int) -> None:
    options = RunOptions(name="r", engine="fsdp2", backend="stock")
    task = Task(
        make_model=lambda: net(1 + rank),
        make_loss=lambda model, ours: None,  # type: ignore[arg-type,return-value]
        batches=None,  # type: ignore[arg-type]
        held_out=(),
        unit="images",
        learning_rate=0.1,
        export=lambda model, folder: None,
    )
    process = Process(rank, world_size, torch.device("cpu"))
    with pytest.raises(RecipeError, match=r"^weights: \w+ for rank 0 on .*, \w+ for rank 1 on "):
        Trainer(task, options, process, ours=False)


def test_parts_of_two_models_are_not_trained_as_one() -> None:
    spawn_ranks(_of_other_weights, 2, backend="gloo")
