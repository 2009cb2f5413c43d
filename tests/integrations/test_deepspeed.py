"""DeepSpeed's engines on deepytorch: the losses of stock DeepSpeed, by native collectives."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepytorch
from deepytorch.integrations import _contract
from deepytorch.integrations import deepspeed as adapter
from deepytorch_core.patching import original_of
from deepytorch_core.testing import spawn_ranks

NUM_STEPS = 20
ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}

OFFLOAD = {
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
# name -> (stage, more of the section zero_optimization, more of the configuration)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stage 0": (0, {}, {}),
    "stage 1": (1, {}, {}),
    "stage 2": (2, {}, {}),
    "stage 2, reduce_scatter": (2, {"use_multi_rank_bucket_allreduce": False}, {}),
    "stage 3": (3, {}, {}),
    "stage 3, offload": (3, OFFLOAD, {"zero_force_ds_cpu_optimizer": False}),
    "stage 2, accumulation": (2, {}, {"gradient_accumulation_steps": 2}),
    "stage 3, accumulation": (3, {}, {"gradient_accumulation_steps": 2}),
    "stage 0, bf16": (0, {}, BF16),
    "stage 1, bf16": (1, {}, BF16),
    "stage 2, fp16": (2, {}, FP16),
    "stage 3, bf16": (3, {}, BF16),
    "stage 3, fp16": (3, {}, FP16),
}
NATIVE = {
    0: {"all_reduce", "broadcast"},
    1: {"all_reduce", "all_gather", "broadcast"},
    2: {"all_reduce", "all_gather", "broadcast"},
    3: {"reduce_scatter", "all_gather", "broadcast"},
}


def configuration(name: str = "stage 2") -> dict[str, Any]:
    stage, zero, more = CASES[name]
    persistent = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **persistent, **zero},
        "gradient_clipping": 1.0,
        **more,
    }


def flagged(name: str = "stage 2", **options: Any) -> dict[str, Any]:
    return {**configuration(name), "deepytorch": {"enabled": True, **options}}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
    )


def engine(given: Any, initialize: Callable[..., Any] | None = None) -> Any:
    import deepspeed

    module = model()
    made, *_ = (initialize or deepspeed.initialize)(
        model=module, model_parameters=module.parameters(), config=given
    )
    return made


def train(made: Any, num_steps: int = NUM_STEPS, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
    dtype = next(made.module.parameters()).dtype
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(4, 32, generator=generator).to(dtype)
        targets = torch.randn(4, 8, generator=generator).to(dtype)
        loss = torch.nn.functional.mse_loss(made(inputs), targets)
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    return losses


def calls(*, native: bool) -> collections.Counter[str]:
    counted: collections.Counter[str] = collections.Counter()
    for row in deepytorch.report().rows:
        if (row.algorithm != "delegate") is native:
            counted[row.op] += row.calls
    return counted


def stock_group() -> None:
    """A group of torch's own; importing this module has activated deepytorch."""
    deepytorch.deactivate()
    dist.init_process_group("gloo")


def compare(rank: int, world_size: int) -> dict[str, Any]:
    stock_group()
    adapter.undo()
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed asks oneDNN, which has fast fp16 on few CPUs; torch has it on all.
    get_accelerator().is_fp16_supported = lambda: True
    results = {}
    for name in CASES:
        stock = train(engine(configuration(name)))
        assert dist.get_backend() == "gloo"
        before, delegated = calls(native=True), calls(native=False)
        ours = train(engine(flagged(name), adapter.initialize))
        results[name] = {
            "stock": stock,
            "ours": ours,
            "backend": dist.get_backend(),
            "native": set(calls(native=True) - before),
            "delegated": set(calls(native=False) - delegated),
        }
        adapter.undo()
        assert original_of(deepspeed.initialize) is deepspeed.initialize
    return results


def test_losses_are_those_of_stock_deepspeed_in_every_mode() -> None:
    for results in spawn_ranks(compare, 2, fresh=True, env=ENVIRONMENT, timeout_s=100):
        for name, seen in results.items():
            assert seen["ours"] == seen["stock"], name
            assert len(set(seen["stock"])) > 1, name
            assert seen["backend"] == "deepytorch", name
            assert seen["native"] >= NATIVE[CASES[name][0]], name
            assert not seen["delegated"], name
