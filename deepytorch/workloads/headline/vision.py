"""Rows of image models: classifiers of torchvision and timm under DDP, Stable Diffusion's UNet."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deepytorch
from deepytorch.examples import vision_models
from deepytorch.workloads.headline import OURS
from deepytorch.workloads.headline.job import ArmRun
from deepytorch.workloads.headline.worker import Trained, swap_kernels
from deepytorch_core import config
from deepytorch_core.bench.job import BenchError
from deepytorch_core.nn import channels_last

_NUM_BATCHES = 2
_WEIGHT_OF_AUXILIARY = 0.3


def build(job: ArmRun, device: torch.device) -> Trained:
    """The arm's model, and a function that trains it on a batch of a number."""
    torch.manual_seed(0)
    is_unet = job.row.more["family"] == "unet"
    precision = _Precision(job.row.precision, device)
    with torch.device(device):
        model = _unet(job) if is_unet else _classifier(job)
    model = model.to(precision.dtype)
    batches = [_batch(job, device, precision.dtype, number) for number in range(_NUM_BATCHES)]
    layout = "channels_last" in job.arm
    ours = job.arm.startswith(OURS)
    if layout:
        given: Any = model  # this use of it is not typed
        model = given.to(memory_format=torch.channels_last)
        batches = [{n: _laid_out(value) for n, value in batch.items()} for batch in batches]
    mode = config.current().kernels if ours else "off"
    scaler = precision.scaler
    if ours:
        channels_last.choose(model, mode=mode)
        with precision.autocast():  # decided before DDP lays its buckets out like the weights
            loss = _loss(model, batches[0], is_unet)
        del loss
    if job.arm.endswith("compile"):
        model.compile()
    wrapped: Any = model
    if job.world_size > 1:
        devices = [device] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    optimizer = _optimizer(job, model, is_unet, fused=layout)
    if ours:
        swap_kernels(model, [optimizer], device, autocast=precision.is_mixed)
        deepytorch.compile(model)

    def train(number: int) -> torch.Tensor:
        with precision.autocast():
            loss = _loss(wrapped, batches[number % _NUM_BATCHES], is_unet)
        torch.autograd.backward(scaler.scale(loss))
        if is_unet:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    parameters = sum(one.numel() for one in model.parameters())
    return Trained(model, train, [job.micro_batch] * _NUM_BATCHES, parameters)


class _Precision:
    """A row's: "fp32"; "bf16", the whole model; "amp" or "fp16", mixed by autocast.

    Mixed is float16 with a scaler on GPUs, bfloat16 on CPUs.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.dtype = torch.bfloat16 if name == "bf16" else torch.float32
        self.is_mixed = name in ("amp", "fp16")
        self._kind = device.type
        self._autocast = torch.float16 if device.type == "cuda" else torch.bfloat16
        # Less than the usual 65536, with which the first gradients overflow: torch's fused SGD, of
        # the tuned arms, then goes on with a momentum that was never filled.
        is_used = self.is_mixed and device.type == "cuda"
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=is_used)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._kind, dtype=self._autocast, enabled=self.is_mixed)


def _classifier(job: ArmRun) -> nn.Module:
    if job.scale == "full":
        try:
            network = vision_models.load(job.row.more["model"], job.shape["image"])
        except vision_models.UnknownModelError as error:
            raise BenchError(f"{job.row.name}: {error}") from error
        model = network.make(job.shape["classes"])
        _switch_dropout_off(model)
        return model
    from transformers import ResNetConfig, ResNetForImageClassification

    settings: Any = ResNetConfig
    small = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
    return ResNetForImageClassification(settings(num_labels=job.shape["classes"], **small))


def _switch_dropout_off(model: nn.Module) -> None:
    """Arms would draw other random numbers: a compiled one, one of another layout in memory."""
    for one in model.modules():
        name = type(one).__name__
        if "Drop" in name or name == "StochasticDepth":
            for chance in ("p", "drop_prob"):  # torch's and torchvision's, timm's
                if hasattr(one, chance):
                    setattr(one, chance, 0.0)


def _unet(job: ArmRun) -> nn.Module:
    """Stable Diffusion 2.1's, with `width` channels at its widest resolution."""
    try:
        from diffusers import UNet2DConditionModel
    except ModuleNotFoundError:
        raise BenchError(f"{job.row.name} needs diffusers: pip install diffusers") from None
    width = job.shape["width"]
    heads: Any = (5, 10, 20, 20)
    channels: Any = (width, 2 * width, 4 * width, 4 * width)
    cross = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
    settings: dict[str, Any] = {
        "down_block_types": (cross[0],) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + (cross[1],) * 3,
        "layers_per_block": 2,
    }
    if job.scale == "tiny":
        heads, channels = 8, (width, 2 * width)
        settings = {
            "down_block_types": (cross[0], "DownBlock2D"),
            "up_block_types": ("UpBlock2D", cross[1]),
            "layers_per_block": 1,
            "norm_num_groups": 8,
        }
    make: Any = UNet2DConditionModel
    model: nn.Module = make(
        sample_size=job.shape["image"],
        block_out_channels=channels,
        attention_head_dim=heads,
        cross_attention_dim=job.shape["text"],
        use_linear_projection=True,
        **settings,
    )
    return model


def _batch(
    job: ArmRun, device: torch.device, dtype: torch.dtype, number: int
) -> dict[str, torch.Tensor]:
    shape, size = job.shape, job.micro_batch
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    side = shape["image"]
    if job.row.more["family"] == "unet":
        steps = torch.randint(0, 1000, (size,), generator=generator)
        batch = {
            "sample": normal(size, 4, side, side),
            "timestep": steps,
            "encoder_hidden_states": normal(size, shape["length"], shape["text"]),
            "target": normal(size, 4, side, side),
        }
    else:
        classes = torch.randint(0, shape["classes"], (size,), generator=generator)
        batch = {"x": normal(size, 3, side, side), "y": classes}
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in batch.items()
    }


def _laid_out(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def _loss(model: Any, batch: dict[str, torch.Tensor], is_unet: bool) -> torch.Tensor:
    if is_unet:
        given = {name: value for name, value in batch.items() if name != "target"}
        predicted = model(**given).sample
        return nn.functional.mse_loss(predicted.float(), batch["target"])
    output: Any = model(batch["x"])

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.float(), batch["y"])

    logits = output if isinstance(output, torch.Tensor) else output.logits
    loss = loss_of(logits)
    # Auxiliary classifiers (GoogLeNet's, Inception's) train too: DDP awaits their gradients.
    for other in output if isinstance(output, tuple) else ():
        if other is not logits:
            loss = loss + _WEIGHT_OF_AUXILIARY * loss_of(other)
    return loss


def _optimizer(
    job: ArmRun, model: nn.Module, is_unet: bool, *, fused: bool
) -> torch.optim.Optimizer:
    more: dict[str, Any] = {"fused": True} if fused else {}
    if is_unet:
        return torch.optim.AdamW(model.parameters(), lr=5e-6, **more)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, **more)
