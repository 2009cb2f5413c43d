"""Stable Diffusion's UNet, as diffusers' DreamBooth script trains it: alone, or the whole loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepytorch.workloads.headline import OURS
from deepytorch.workloads.headline.image_arm import NUM_BATCHES, Batch, ImageArm
from deepytorch.workloads.headline.job import ArmRun
from deepytorch_core.bench.job import BenchError
from deepytorch_core.data.cache import Encoded as Outputs
from deepytorch_core.data.cache import EncoderCache

_PIXELS = 8  # of a side, for one of a latent's
_LATENT_CHANNELS = 4
_TRAINED_STEPS = 1000  # of the noise's schedule


class _Unet:
    """The model, its loss and its optimizer."""

    max_norm: float | None = 1.0

    def __init__(self, arm: ImageArm) -> None:
        with torch.device(arm.device):
            model = _unet(arm.job)
        self.model = arm.place(model)

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        given = {name: value for name, value in batch.items() if name != "target"}
        predicted = model(**given).sample
        return nn.functional.mse_loss(predicted.float(), batch["target"].float())

    def optimizer(self, **more: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=5e-6, **more)


class PrecomputedLatents(_Unet):
    """Latents and embeddings that every arm has from before."""

    def __init__(self, arm: ImageArm) -> None:
        super().__init__(arm)
        self._batches = [arm.laid_out(_encoded(arm, number)) for number in range(NUM_BATCHES)]

    def batch(self, number: int) -> Batch:
        return self._batches[number % NUM_BATCHES]


class Pipeline(_Unet):
    """Images and one prompt: VAE and text encoder, frozen and in half precision, in every step.

    Ours asks a cache for what they give, and draws each step's latents from the posterior as the
    others do. What is drawn depends on the step alone, so all arms train on the same.
    """

    def __init__(self, arm: ImageArm) -> None:
        from diffusers import DDPMScheduler

        super().__init__(arm)
        job, device, frozen = arm.job, arm.device, arm.precision.frozen_dtype
        self._arm, self._size, self._device = arm, job.micro_batch, device
        with torch.device(device):
            vae, text_encoder = _vae(job), _text_encoder(job)
        self._vae: Any = vae.to(device, frozen).requires_grad_(False).eval()
        self._text_encoder: Any = text_encoder.to(device, frozen).requires_grad_(False).eval()
        scheduler: Any = DDPMScheduler
        self._schedule = scheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            num_train_timesteps=_TRAINED_STEPS,
            prediction_type="v_prediction",
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        side = _PIXELS * job.shape["image"]
        count = NUM_BATCHES * job.micro_batch
        self._images = torch.rand((count, 3, side, side), generator=generator).to(device, frozen)
        prompt = torch.randint(
            0, job.shape["vocabulary"], (1, job.shape["length"]), generator=generator
        )
        self._prompt = prompt.to(device)
        self._caches: tuple[EncoderCache, EncoderCache] | None = None
        if job.arm.startswith(OURS):
            self._caches = (
                EncoderCache("VAE latents", self._vae),
                EncoderCache("text embeddings", self._text_encoder),
            )

    def batch(self, number: int) -> Batch:
        first = number % NUM_BATCHES * self._size
        places = range(first, first + self._size)
        posterior, text = self._encode(places)
        generator = torch.Generator(self._device).manual_seed(1000 * number + dist.get_rank())

        def normal() -> torch.Tensor:
            mean = posterior["mean"]
            return torch.randn(
                mean.shape, generator=generator, device=self._device, dtype=mean.dtype
            )

        latents = posterior["mean"] + posterior["std"] * normal()
        latents = latents * self._vae.config.scaling_factor
        steps = torch.randint(
            0, _TRAINED_STEPS, (self._size,), generator=generator, device=self._device
        )
        noise = normal()
        sample = self._schedule.add_noise(latents, noise, steps)
        return self._arm.laid_out(
            {
                "sample": sample.to(self._arm.precision.dtype),
                "timestep": steps,
                "encoder_hidden_states": text["hidden"],
                "target": self._schedule.get_velocity(latents, noise, steps),
            }
        )

    def _encode(self, places: Sequence[int]) -> tuple[Outputs, Outputs]:
        if self._caches is None:
            with torch.no_grad():
                return self._posterior(places), self._embeddings(len(places))
        latents, texts = self._caches
        keys = ["prompt"] * len(places)
        return (
            latents.get(places, lambda missing: self._posterior([places[i] for i in missing])),
            texts.get(keys, lambda missing: self._embeddings(len(missing))),
        )

    def _posterior(self, places: Sequence[int]) -> Outputs:
        of = self._vae.encode(self._images[list(places)]).latent_dist
        return {"mean": of.mean, "std": of.std}

    def _embeddings(self, count: int) -> Outputs:
        prompts = self._prompt.expand(count, -1)
        return {"hidden": self._text_encoder(prompts).last_hidden_state}


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


def _vae(job: ArmRun) -> nn.Module:
    from diffusers import AutoencoderKL

    full = job.scale == "full"
    make: Any = AutoencoderKL
    model: nn.Module = make(
        block_out_channels=(128, 256, 512, 512) if full else (8, 8, 8, 8),
        layers_per_block=2 if full else 1,
        norm_num_groups=32 if full else 8,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=_LATENT_CHANNELS,
        sample_size=_PIXELS * job.shape["image"],
    )
    return model


def _text_encoder(job: ArmRun) -> nn.Module:
    """OpenCLIP's of ViT-H, but for its last layer, at full scale."""
    from transformers import CLIPTextConfig, CLIPTextModel

    full = job.scale == "full"
    width = job.shape["text"]
    settings = CLIPTextConfig(
        vocab_size=job.shape["vocabulary"],
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=23 if full else 2,
        num_attention_heads=16 if full else 4,
        max_position_embeddings=job.shape["length"],
        hidden_act="gelu",
        bos_token_id=0,
        eos_token_id=job.shape["vocabulary"] - 1,
        pad_token_id=1,
    )
    model: nn.Module = CLIPTextModel(settings)
    return model


def _encoded(arm: ImageArm, number: int) -> Batch:
    shape, size, side = arm.job.shape, arm.job.micro_batch, arm.job.shape["image"]
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(arm.device, arm.precision.dtype)

    steps = torch.randint(0, _TRAINED_STEPS, (size,), generator=generator)
    return {
        "sample": normal(size, _LATENT_CHANNELS, side, side),
        "timestep": steps.to(arm.device),
        "encoder_hidden_states": normal(size, shape["length"], shape["text"]),
        "target": normal(size, _LATENT_CHANNELS, side, side),
    }
