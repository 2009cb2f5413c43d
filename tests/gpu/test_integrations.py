"""Every adapter on GPUs: the losses of 20 steps are NCCL's, and the collectives are ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import needs_gpus, spawn_ranks
from deepytorch_core.testing.tensors import rank_gpu

WORLD_SIZE = min(4, max(2, torch.cuda.device_count()))
STEPS = 20
pytestmark = [pytest.mark.gpu, needs_gpus(2), pytest.mark.timeout(600)]

STOCK = {"DEEPYTORCH_ENABLED": "0"}
# Fused and compiled code rounds differently, and is not what is compared here.
OURS = {f"DEEPYTORCH_{name}": "off" for name in ("COMPILE", "KERNELS", "PADDING_FREE")}


def _assert_equal(ours: list[float], stock: list[float]) -> None:
    """Two ranks' sums don't depend on their order."""
    if WORLD_SIZE == 2:
        assert ours == stock
    else:
        assert ours == pytest.approx(stock, rel=1e-5)


def _train(rank: int, world_size: int, framework: str, ours: bool) -> dict[str, Any]:
    import deepytorch
    from deepytorch import workloads

    job = workloads.TrainJob(
        framework=framework,
        device="cuda",
        baseline="nccl",
        world_size=world_size,
        parameters=1 << 20,
    )
    step = workloads.load(framework).build(job, rank_gpu(rank), ours=ours)
    losses = [step().item() for _ in range(STEPS)]
    report = deepytorch.report()
    rows = report.rows
    return {
        "losses": losses,
        "decided": [decision["what"] for decision in report.decisions if "what" in decision],
        "backend": serving_name(),
        "calls": sum(row.calls for row in rows),
        "delegated": sum(row.calls for row in rows if row.algorithm == "delegate"),
    }


@pytest.mark.parametrize(
    "framework",
    [
        "deepspeed-zero1",
        "deepspeed-zero2",
        "deepspeed-zero3",
        "deepspeed-zero3-offload_param",
        "deepspeed-zero3-offload_optimizer",
        "fsdp1",
        "fsdp2",
        "ddp",
        "accelerate-ddp",
        "accelerate-fsdp2",
        "megatron",
        "tensor-parallel",
        "tensor-parallel-decode",
    ],
)
def test_losses_are_nccls(framework: str) -> None:
    from deepytorch import workloads

    settings = {"timeout_s": 120.0, "fresh": True}
    stock = spawn_ranks(_train, WORLD_SIZE, framework, False, env=STOCK, **settings)
    ours = spawn_ranks(_train, WORLD_SIZE, framework, True, env=OURS, **settings)
    for rank in range(WORLD_SIZE):
        assert stock[rank]["calls"] == 0
        assert ours[rank]["calls"] > 0
        assert "deepytorch" in ours[rank]["backend"]
        _assert_equal(ours[rank]["losses"], stock[rank]["losses"])
        assert len(set(ours[rank]["losses"])) == STEPS
        is_offloaded = workloads.OFFLOAD in framework
        assert ("ZeRO-3's weights after an update" in ours[rank]["decided"]) == is_offloaded


def _run_trainer(rank: int, world_size: int, folder: str, ours: bool) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    import deepytorch

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, 256, (STEPS * 4 * world_size, 32), generator=generator)
    data = [{"input_ids": text, "labels": text} for text in texts]
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    if ours:
        from deepytorch.integrations.transformers import DeepytorchTrainer as Chosen
    else:
        Chosen = Trainer
    trainer = Chosen(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "calls": sum(row.calls for row in deepytorch.report().rows),
    }


def test_the_trainers_losses_are_nccls(tmp_path: Any) -> None:
    settings = {"timeout_s": 120.0, "fresh": True}
    stock = spawn_ranks(_run_trainer, WORLD_SIZE, str(tmp_path), False, env=STOCK, **settings)
    ours = spawn_ranks(_run_trainer, WORLD_SIZE, str(tmp_path), True, env=OURS, **settings)
    assert stock[0]["calls"] == 0
    assert ours[0]["calls"] > 0
    assert len(ours[0]["losses"]) == STEPS
    _assert_equal(ours[0]["losses"], stock[0]["losses"])
