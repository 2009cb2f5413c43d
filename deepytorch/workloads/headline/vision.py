"""Rows of image models under DDP: classifiers of torchvision and timm, Stable Diffusion's UNet."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import deepytorch
from deepytorch.examples import vision_models
from deepytorch.workloads.headline import OURS, OURS_BF16, PLAIN_BF16
from deepytorch.workloads.headline.image_arm import NUM_BATCHES, Batch, ImageArm
from deepytorch.workloads.headline.job import ArmRun
from deepytorch.workloads.headline.precision import Precision
from deepytorch.workloads.headline.worker import Trained, swap_kernels
from deepytorch_core.base import config
from deepytorch_core.bench.job import BenchError
from deepytorch_core.nn import channels_last

_WEIGHT_OF_AUXILIARY = 0.3


class Family(Protocol):
    """The training of a row in one arm: the model, and what its loop does with it in a step."""

    model: nn.Module
    max_norm: float | None  # to which the loop clips gradients; None: it does not

    def batch(self, number: int) -> Batch:
        """The step's, as the arm lays it out."""

    def loss(self, model: Any, batch: Batch) -> torch.Tensor: ...

    def optimizer(self, **more: Any) -> torch.optim.Optimizer: ...


def build(job: ArmRun, device: torch.device, group: dist.ProcessGroup | None = None) -> Trained:
    """The arm's model, and a function that trains it on a batch of a number.

    DDP reduces over `group`, by default over the default one.
    """
    torch.manual_seed(0)
    precision = Precision(job.row.precision, device)
    layout, ours = "channels_last" in job.arm, job.arm.startswith(OURS)
    family = _family(ImageArm(job, device, precision, layout))
    model = family.model
    if ours:
        mode = config.current().kernels
        channels_last.choose(model, mode=mode)
        batch = family.batch(0)
        with precision.autocast():  # decided before DDP lays its buckets out like the weights
            loss = family.loss(model, batch)
        del batch, loss
    if job.arm.endswith("compile"):
        model.compile()
    wrapped = _wrapped(job, model, device, group) if job.world_size > 1 else model
    optimizer = family.optimizer(**({"fused": True} if layout else {}))
    if ours:
        swap_kernels(model, [optimizer], device, autocast=precision.is_mixed)
        deepytorch.compile(model, is_patient=False)
    scaler = precision.scaler

    def train(number: int) -> torch.Tensor:
        batch = family.batch(number)
        with precision.autocast():
            loss = family.loss(wrapped, batch)
        torch.autograd.backward(scaler.scale(loss))
        if family.max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), family.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Trained(model, train, [job.micro_batch] * NUM_BATCHES, parameters)


def _wrapped(
    job: ArmRun, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None
) -> DistributedDataParallel:
    devices = [device] if device.type == "cuda" else None
    settings: Any = {"device_ids": devices, "gradient_as_bucket_view": True}
    if job.arm == OURS_BF16:
        from deepytorch.integrations.ddp import prepare_ddp

        return prepare_ddp(model, process_group=group, compress="bf16", **settings)
    ddp = DistributedDataParallel(model, process_group=group, **settings)
    if job.arm == PLAIN_BF16:
        ddp.register_comm_hook(group, default_hooks.bf16_compress_hook)
    return ddp


def _family(arm: ImageArm) -> Family:
    name = arm.job.row.more["family"]
    if name in ("unet", "pipeline"):
        from deepytorch.workloads.headline import diffusion

        return diffusion.PrecomputedLatents(arm) if name == "unet" else diffusion.Pipeline(arm)
    return Classifier(arm)


class Classifier:
    """Images and classes made up once; SGD."""

    max_norm: float | None = None

    def __init__(self, arm: ImageArm) -> None:
        with torch.device(arm.device):
            model = _classifier(arm.job)
        self.model = arm.place(model)
        self._batches = [arm.laid_out(_images(arm, number)) for number in range(NUM_BATCHES)]

    def batch(self, number: int) -> Batch:
        return self._batches[number % NUM_BATCHES]

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        return _cross_entropy(model, batch)

    def optimizer(self, **more: Any) -> torch.optim.Optimizer:
        weights = self.model.parameters()
        return torch.optim.SGD(weights, lr=0.01, momentum=0.9, weight_decay=1e-4, **more)


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


def _cross_entropy(model: Any, batch: Batch) -> torch.Tensor:
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


def _switch_dropout_off(model: nn.Module) -> None:
    """Arms would draw other random numbers: a compiled one, one of another layout in memory."""
    for module in model.modules():
        name = type(module).__name__
        if "Drop" in name or name == "StochasticDepth":
            for chance in ("p", "drop_prob"):  # torch's and torchvision's, timm's
                if hasattr(module, chance):
                    setattr(module, chance, 0.0)


def _images(arm: ImageArm, number: int) -> Batch:
    shape, size = arm.job.shape, arm.job.micro_batch
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    classes = torch.randint(0, shape["classes"], (size,), generator=generator)
    images = torch.randn((size, 3, shape["image"], shape["image"]), generator=generator)
    return {"x": images.to(arm.device, arm.precision.dtype), "y": classes.to(arm.device)}
