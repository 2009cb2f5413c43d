"""kernels under DDP, FSDP2 and ZeRO on two ranks: the head's weights are whole when they count."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import deepytorch
from deepytorch.integrations.kernels import causal_loss as causal_loss  # registers its kernels
from deepytorch_core import guard
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.nn import channels_last, kernels
from deepytorch_core.nn.deferred_logits import DeferredLogits
from deepytorch_core.nn.kernels import (
    Kernel,
    KernelPlace,
    KernelProbe,
    KernelSetting,
    apply_kernels,
)
from deepytorch_core.testing import spawn_ranks

STEPS = 3


def llama(*, tied: bool) -> Any:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(sizes).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = torch.randint(3, 90, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def swap(model: Any) -> None:
    before = config.current()
    config.set_current(Options(profile=None, log="error"))
    try:
        names = apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), "on").names
    finally:
        config.set_current(before)
    assert "chunked" in names.values()


def train(call: Any, model: Any, *, ours: bool, late: bool = False) -> list[Any]:
    """Losses, and logits read after the forward, of plain SGD on the parameters.

    With `late` ours can't give those logits: reading them would need the other ranks.
    """
    found: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        output = call(**batch(step))
        assert isinstance(output.logits, DeferredLogits) == ours
        output.loss.backward()
        found.append(output.loss.item())
        optimizer.step()
        optimizer.zero_grad()
    output = call(**batch(0))
    if late:
        with pytest.raises(RuntimeError, match="kernels=off"):
            output.logits.sum()
    else:
        found.append(output.logits.detach().float().sum().item())
    output.loss.backward()
    optimizer.step()
    if ours and not late:
        output = call(**batch(0))
        optimizer.step()
        with pytest.raises(RuntimeError, match="kernels=off"):
            output.logits.sum()
    return found


def under_ddp_and_fsdp2(rank: int, world_size: int) -> dict[str, list[list[Any]]]:
    from torch.distributed.fsdp import fully_shard

    found: dict[str, list[list[Any]]] = {}
    for tied in (False, True):
        for arm in (False, True):
            model = llama(tied=tied)
            if arm:
                swap(model)
            ddp = DistributedDataParallel(model)
            found.setdefault(f"DDP, tied={tied}", []).append(train(ddp, model, ours=arm))
            model = llama(tied=tied)
            if arm:
                swap(model)
            for layer in model.model.layers:
                fully_shard(layer)
            if not tied:
                fully_shard(model.lm_head)  # a unit of its own: its weights come and go by hooks
            fully_shard(model)
            losses = train(model, model, ours=arm, late=arm)
            found.setdefault(f"FSDP2, tied={tied}", []).append(losses)
    return found


def test_kernels_under_ddp_and_fsdp2_train_as_stock() -> None:
    for found in spawn_ranks(under_ddp_and_fsdp2, 2, backend="gloo"):
        for name, (stock, ours) in found.items():
            compared = stock[: len(ours)]
            assert len(compared) >= STEPS
            assert ours == pytest.approx(compared, rel=1e-5), name


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = torch.nn.Conv2d(3, 8, 3)
        self.second = torch.nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).mean((2, 3))


def layout_under_ddp(rank: int, world_size: int, fused: bool, folder: Path) -> list[Any]:
    """Weights after some steps, stock and with channels_last decided in the first of them."""
    config.set_current(Options(profile=str(folder / f"profile{rank}.json"), log="error"))
    times = {"stock": [2.0] * 5, "channels_last": [1.0 if rank == 0 else 3.0] * 5}
    found: list[Any] = []
    for arm in (False, True):
        model = Convolutions()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused or None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guard, "interleaved", lambda arms, *_, **__: times)
            if arm:
                channels_last.choose(model)
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(STEPS):
                loss = ddp(torch.randn(2, 3, 9, 9, generator=generator)).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        found.append([parameter.detach() for parameter in model.parameters()])
        found.append(len(model._forward_pre_hooks))
    config.set_current(None)
    return found


@pytest.mark.parametrize("fused", [True, False])
def test_kernels_channels_last_under_ddp_is_each_ranks_own(fused: bool, tmp_path: Path) -> None:
    """Check that ranks sum what lies at the same place, whichever of them has the layout."""
    ranks = spawn_ranks(layout_under_ddp, 2, fused, tmp_path, backend="gloo")
    # The trial's hook is there in both; the one that converts inputs where it was kept.
    assert [ours - stock for _, stock, _, ours in ranks] == [2, 1]
    for stock, _, ours, _ in ranks:
        for a, b in zip(ours, stock, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Uneven(Kernel):
    kind = "uneven"
    name = "uneven"

    def apply(self, target: Any, setting: KernelSetting) -> Any:
        target.scale = 1.0 + dist.get_rank()  # wrong on rank 1 alone
        return lambda: setattr(target, "scale", 1.0)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.scale = 1.0

    def forward(self) -> torch.Tensor:
        return self.weight * self.scale


def one_rank_is_wrong(
    rank: int, world_size: int, mode: str, folder: Path
) -> tuple[dict[str, str], str, float]:
    # One that is done may not tell the other by a profile.
    config.set_current(Options(profile=str(folder / f"{rank}.json"), log="error"))
    model, copied = Scaled(), Scaled()

    def run() -> torch.Tensor:
        made = copied()
        made.sum().backward()
        return made

    place = KernelPlace(
        kind="uneven",
        what="uneven",
        targets=(model,),
        probe=lambda: KernelProbe(copied, copied, run),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_finders", {"uneven": lambda setting: [place]})
        patch.setattr(kernels, "_kernels", {"uneven": Uneven()})
        names = apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), mode).names
    config.set_current(None)
    return names, str(decisions.made()[-1].get("dropped", {})), model.scale


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_kernels_wrong_on_one_rank_are_dropped_there(mode: str, tmp_path: Path) -> None:
    right, wrong = spawn_ranks(one_rank_is_wrong, 2, mode, tmp_path, backend="gloo")
    assert right == ({"uneven": "uneven"} if right[0] or mode == "on" else {}, "{}", 1.0)
    names, dropped, scale = wrong
    assert not names
    assert "differs" in dropped or "off by" in dropped, dropped
    assert scale == 1.0


def under_zero(rank: int, world_size: int) -> dict[str, list[list[Any]]]:
    """Losses, the sum of a training step's logits where that can be had, and of an evaluation's.

    Of each stage stock's and ours; "3, partitioned" has its weights on both ranks from the start.
    """
    import deepspeed

    deepytorch.deactivate()
    dist.init_process_group("gloo")
    found: dict[str, list[list[Any]]] = {}
    stages = {"2": 2, "3": 3, "3, partitioned": 3, "3, tied, checkpointed": 3}
    for arm, (name, stage) in itertools.product((False, True), stages.items()):
        section: dict[str, Any] = {"deepytorch": {"enabled": True, "kernels": "on", "log": "error"}}
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            **(section if arm else {}),
        }
        if arm:
            deepytorch.activate(log="error")
        partitioned = deepspeed.zero.Init(
            enabled="partitioned" in name, config_dict_or_path=settings
        )
        with partitioned:
            model = llama(tied="tied" in name)
        if "checkpointed" in name:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        losses: list[Any] = []
        for step in range(2 * STEPS):
            output = engine(**batch(step))
            assert isinstance(output.logits, DeferredLogits) == arm
            engine.backward(output.loss)
            engine.step()
            losses.append(output.loss.item())
        output = engine(**batch(0))
        if arm and stage == 3:
            with pytest.raises(RuntimeError, match="kernels=off"):
                output.logits.detach().sum()
        else:
            losses.append(output.logits.detach().float().sum().item())
        assert bool(optimizer._optimizer_step_pre_hooks) == arm, name
        model.lm_head.register_forward_hook(lambda *_: None)  # sees logits
        assert type(engine(**batch(0)).logits) is torch.Tensor
        engine.eval()
        with torch.no_grad():
            losses.append(engine(**batch(1)).logits.float().sum().item())
        found.setdefault(name, []).append(losses)
    return found


def test_kernels_under_zero_train_as_stock(deepspeeds_ranks: dict[str, Any]) -> None:
    # DeepSpeed may have to compile something first.
    for found in spawn_ranks(under_zero, 2, **deepspeeds_ranks, timeout_s=60):
        for name, (stock, ours) in found.items():
            assert len(ours) >= 2 * STEPS + 1
            compared = stock if len(ours) == len(stock) else [*stock[:-2], stock[-1]]
            assert ours == pytest.approx(compared, rel=1e-4), name
