# SPDX-License-Identifier: Apache-2.0
"""engine= of the recipes: whatever shards a model, the losses are the same."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from deepytorch_core.testing import spawn_ranks

WORDS = {
    "device": "cpu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "max_length": 96,
    "batch_size": 2,
    "accumulation": 2,
    "steps": 4,
    "warmup_steps": 1,
    "learning_rate": 1e-2,
    "sample_tokens": 8,
}
ENGINES = [
    {"engine": "ddp"},
    {"engine": "ddp", "gradient_checkpointing": True},
    {"engine": "accelerate"},
    {"engine": "fsdp2"},
    {"engine": "deepspeed", "zero_stage": 2},
    {"engine": "deepspeed", "zero_stage": 3},
]


def train_under_every_engine(rank: int, world_size: int, folder: str) -> list[list[float]]:
    """The losses of each of ENGINES; the last two steps go on from a checkpoint, otherwise."""
    from deepytorch.recipes import llama_sft
    from deepytorch.recipes.base.run import Process
    from deepytorch.recipes.runner import checkpoint
    from deepytorch.recipes.runner.trainer import Trainer

    process = Process(rank, world_size, torch.device("cpu"))
    config = llama_sft.Config(**WORDS)
    task = llama_sft.prepare(config, process)
    curves = []
    for number, words in enumerate(ENGINES):
        options = dataclasses.replace(config, **words)
        task.batches.position = 0
        trainer = Trainer(task, options, process)
        curve = []
        for step in range(options.steps):
            if step == 2:
                place = Path(folder) / str(number)
                facts = {"recipe": "llama_sft"}
                state = {"step": step}
                problem = checkpoint.save(
                    trainer.engine,
                    state,
                    place,
                    process,
                    keep=1,
                    facts=facts,
                    written=checkpoint.Written(world_size),
                )
                assert problem is None
                otherwise = dataclasses.replace(options, learning_rate=5e-3, weight_decay=0.5)
                trainer = Trainer(task, otherwise, process)
                (path,) = checkpoint.checkpoints(place)
                loaded = checkpoint.load(trainer.engine, path, process, facts=facts)
                trainer.go_on_after(loaded["step"])
                for group in trainer.engine.optimizer.param_groups:
                    assert group["lr"] == trainer.schedule.get_last_lr()[0] == 5e-3 * 0.5
                    assert group["weight_decay"] == 0.5
            result = trainer.step([next(task.batches) for _ in range(2)])
            dist.all_reduce(result.loss_share)
            curve.append(result.loss_share.item())
        full = trainer.engine.full_state()
        if rank == 0:
            curve.append(full["model.embed_tokens.weight"].double().square().sum().item())
        else:  # one copy on a host that may not hold one for each rank
            assert not (trainer.engine.sharded and full)
        curves.append(curve)
    return curves


def test_engines_train_alike_and_go_on_from_their_checkpoints() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, _ = spawn_ranks(
            train_under_every_engine, 2, folder, backend="gloo", fresh=True, timeout_s=110
        )
    expected = first[0]
    assert expected[3] < expected[0]
    for words, curve in zip(ENGINES, first, strict=True):
        torch.testing.assert_close(
            torch.tensor(curve), torch.tensor(expected), atol=2e-4, rtol=2e-5, msg=str(words)
        )


def compiled_under_every_engine(rank: int, world_size: int) -> dict[str, list[bool]]:
    """Return by engine, for compile=off and auto, if the model is compiled, or waits for it."""
    from deepytorch.recipes import llama_sft
    from deepytorch.recipes.base.run import Process
    from deepytorch.recipes.runner.trainer import Trainer
    from deepytorch_core.compile import compilation_of

    process = Process(rank, world_size, torch.device("cpu"))
    config = llama_sft.Config(**WORDS)
    task = llama_sft.prepare(config, process)
    found: dict[str, list[bool]] = {}
    for engine in ("ddp", "accelerate", "fsdp2"):
        for policy in ("off", "auto"):
            options = dataclasses.replace(config, engine=engine, compile=policy)
            trainer = Trainer(task, options, process)
            found.setdefault(engine, []).append(compilation_of(trainer.model) is not None)
    return found


def test_compile_off_compiles_under_no_engine() -> None:
    from deepytorch.recipes import llama_sft
    from deepytorch.recipes.runner import engines

    for policy in ("off", "auto"):  # what DeepSpeed's adapter goes by
        options = llama_sft.Config(engine="deepspeed", compile=policy)
        assert engines.deepspeed_config(options)["deepytorch"]["compile"] == policy
    (found,) = spawn_ranks(
        compiled_under_every_engine, 1, backend="gloo", fresh=True, timeout_s=110
    )
    assert found == dict.fromkeys(("ddp", "accelerate", "fsdp2"), [False, True])
