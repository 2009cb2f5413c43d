"""ZeRO-2 whose reduction runs beside the backward pass, against stock DeepSpeed's, which waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepytorch_core.testing import needs_gpus, spawn_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(2)]

STEPS = 6
WIDTH = 1024
BUCKET = 3 << 20  # several weights, so that a step has some buckets, and the first layer is larger


def _train(rank: int, world_size: int, ours: bool, forced: bool) -> dict[str, Any]:
    deepspeed = pytest.importorskip("deepspeed")
    from deepytorch.integrations.deepspeed import buckets

    if forced:
        buckets._Bucket.is_faster_beside = lambda *_: True
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4 * WIDTH, WIDTH), torch.nn.ReLU()]
    for _ in range(12):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers)
    configuration: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 64,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": BUCKET},
        "zero_allow_untested_optimizer": True,
    }
    if ours:
        configuration["deepytorch"] = {"enabled": True, "kernels": "off", "compile": "off"}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config=configuration,
    )
    drawn = torch.rand(1, device="cuda").item()
    generator = torch.Generator(device="cuda").manual_seed(rank)
    losses = []
    for _ in range(2 * STEPS):
        data = torch.randn(64, 4 * WIDTH, generator=generator, device="cuda").bfloat16()
        loss = engine(data).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "overlaps": engine.optimizer.overlap_comm, "drawn": drawn}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("forced", [False, True])
def test_losses_are_those_of_a_backward_pass_that_waits(forced: bool) -> None:
    env = {"DEEPYTORCH_TUNE": "auto"}
    settings: dict[str, Any] = {"timeout_s": 120.0, "fresh": True, "env": env}
    stock = spawn_ranks(_train, 2, False, False, **settings)
    ours = spawn_ranks(_train, 2, True, forced, **settings)
    for rank in range(2):
        assert not stock[rank]["overlaps"]
        assert ours[rank]["drawn"] == stock[rank]["drawn"]  # measuring draws no random numbers
        assert ours[rank]["overlaps"] in ([True] if forced else [True, False])
        assert ours[rank]["losses"] == pytest.approx(stock[rank]["losses"], rel=5e-3)
        assert len(set(ours[rank]["losses"])) == 2 * STEPS
