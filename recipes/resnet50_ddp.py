# SPDX-License-Identifier: Apache-2.0
"""Training an image classifier with DistributedDataParallel.

    torchrun --nproc-per-node 2 -m deepytorch.recipes.resnet50_ddp steps=40
    torchrun --nproc-per-node 8 -m deepytorch.recipes.resnet50_ddp \\
        model=resnet50 data=imagenet/train image_size=224 batch_size=512 precision=fp16 \\
        steps=50000 num_workers=8

Without ``model=`` it is a ResNet with narrow layers (transformers' class). Without ``data=`` it
learns to tell from which part of a photograph a crop is. Any classifier of torchvision or timm can
be the model, and any folder with a folder of images for each class the data. Options:
configs/resnet50_ddp.yaml.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepytorch.examples import vision_models
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process, console
from deepytorch.recipes.data import images as _images
from deepytorch.recipes.data.batches import EndlessBatches
from deepytorch.recipes.data.images import ImageBatch, PhotographParts
from deepytorch.recipes.data.settings import ResnetOptions as Config
from deepytorch.recipes.runner.loop import run_recipe
from deepytorch.recipes.runner.task import Task

_PHOTOGRAPH_CROPS = 4096  # an epoch of the embedded data
_HELD_OUT_SEED = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe: 0 done, 1 --compare found a difference, 2 bad options or data."""
    return run_recipe("resnet50_ddp", Config, prepare, argv)


def prepare(config: Config, process: Process) -> Task[ImageBatch]:
    """The data, the model and the loss."""
    if config.data is None:
        image = _images.photograph()
        trained: Any = PhotographParts(image, config.image_size, config.seed, _PHOTOGRAPH_CROPS)
        kept: Any = PhotographParts(image, config.image_size, _HELD_OUT_SEED, config.held_out)
    else:
        trained, kept = _images.folder_images(
            Path(config.data), config.image_size, config.seed, config.held_out
        )
    if process.is_main:
        text = f"{trained.size} images of {len(trained.classes)} classes, {kept.size} held out"
        console.print(f"data        {text}", highlight=False)
        if config.data is not None:
            _images.say_others(trained.others)
    batches = EndlessBatches(
        trained.size,
        trained.draw,
        _images.collate_images,
        batch_size=config.batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=config.seed,
        num_workers=config.num_workers,
        names=trained.names,
    )
    shown = [kept.draw(index, 0) for index in range(kept.size)]
    held_out = [_images.collate_images(shown)] if shown else []

    def make_model() -> nn.Module:
        torch.manual_seed(config.seed)
        return build_model(config, len(trained.classes))

    def export(model: nn.Module, run_dir: Path) -> None:
        torch.save(model.state_dict(), run_dir / "model.pt")
        (run_dir / "classes.json").write_text(json.dumps(trained.classes), encoding="utf-8")
        if held_out:
            say_accuracy(model, held_out[0], trained.classes, run_dir / "sample.png")

    return Task(
        make_model=make_model,
        make_loss=make_loss,
        batches=batches,
        held_out=held_out,
        unit="images",
        learning_rate=2e-3,
        export=export,
    )


def build_model(config: Config, num_classes: int) -> nn.Module:
    """torchvision's or timm's ``config.model``, or ResNet-50's blocks with narrow layers."""
    if config.model is not None:
        try:
            return vision_models.load(config.model, config.image_size).make(num_classes)
        except vision_models.UnknownModelError as error:
            raise RecipeError(f"model={config.model}: {error}") from error
    from transformers import ResNetConfig, ResNetForImageClassification

    width = config.width
    settings: Any = ResNetConfig  # what it takes beyond its own fields is not declared
    return ResNetForImageClassification(
        settings(
            embedding_size=width,
            hidden_sizes=[4 * width, 8 * width, 16 * width, 32 * width],
            depths=[1, 1, 1, 1],
            num_labels=num_classes,
        )
    )


def make_loss(model: Any, ours: bool) -> Callable[[ImageBatch, torch.Tensor], torch.Tensor]:
    """Cross-entropy over the classes: sum / total."""

    def loss_share(batch: ImageBatch, total: torch.Tensor) -> torch.Tensor:
        try:
            logits = logits_of(model, batch.images)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise RecipeError(
                f"batch_size={len(batch.images)} with image_size={batch.images.shape[-1]} leaves "
                "batch norm one value a channel: use a larger one of them"
            ) from error
        return nn.functional.cross_entropy(logits, batch.classes, reduction="sum") / total

    return loss_share


def logits_of(model: Any, images: torch.Tensor) -> torch.Tensor:
    """[batch, classes] in float32; transformers' models answer with an object."""
    output = model(images)
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return logits.float()


@torch.no_grad()
def say_accuracy(model: nn.Module, batch: ImageBatch, classes: Sequence[str], path: Path) -> None:
    """Print the accuracy on what was held out, and write some of it, the right ones framed."""
    device = next(model.parameters()).device
    model.eval()
    found = logits_of(model, batch.images.to(device)).argmax(dim=1).cpu()
    model.train()
    right = found == batch.classes
    framed = []
    for image, correct in zip(batch.images[:16], right[:16], strict=True):
        picture = image.clone()
        colour = torch.tensor([-1.0, 1.0, -1.0] if correct else [1.0, -1.0, -1.0])[:, None]
        picture[:, :3], picture[:, -3:] = colour[:, None], colour[:, None]
        framed.append(_images.as_image(picture))
    _images.save_grid(framed, path)
    console.print(
        f"accuracy    {right.float().mean():.0%} of {len(right)} held-out images; by chance it "
        f"would be {1 / len(classes):.0%}",
        highlight=False,
    )
    console.print(f"sample      {path}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
