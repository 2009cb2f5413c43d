# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion in parts: loaded from a pipeline's folder or hub id, or made small."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)
from transformers.utils import logging

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.hub import loading_options, reason, whole_files

_bars: Any = logging
_bars.disable_progress_bar()  # of saving: between our own lines they say nothing

_UNET_TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]
_TEXT_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj"]
_TEXT_LENGTH = 48  # tokens of a prompt, of the small models


@dataclass
class Parts:
    """A pipeline's models; SDXL has two tokenizers and two text encoders."""

    tokenizers: list[Any]
    text_encoders: list[Any]
    vae: Any
    unet: Any
    scheduler: Any  # of training
    sampler: Any = None  # the pipeline's own scheduler, where it is another one

    @property
    def is_xl(self) -> bool:
        return len(self.text_encoders) == 2

    def pipeline(self) -> Any:
        """The parts as diffusers' own pipeline, which generates images and saves itself."""
        shared = {"vae": self.vae, "unet": self.unet, "scheduler": self.sampler or self.scheduler}
        if self.is_xl:
            pipeline: Any = StableDiffusionXLPipeline
            made = pipeline(
                **shared,
                text_encoder=self.text_encoders[0],
                text_encoder_2=self.text_encoders[1],
                tokenizer=self.tokenizers[0],
                tokenizer_2=self.tokenizers[1],
                add_watermarker=False,
            )
        else:
            pipeline = StableDiffusionPipeline
            made = pipeline(
                **shared,
                text_encoder=self.text_encoders[0],
                tokenizer=self.tokenizers[0],
                safety_checker=None,
                feature_extractor=None,
                requires_safety_checker=False,
            )
        made.set_progress_bar_config(disable=True)
        return made


def load_parts(model: str) -> Parts:
    """A pipeline in diffusers' layout, in float32. Raises RecipeError when it can't be read."""

    def load(cls: Any, folder: str) -> Any:
        with whole_files(Path(model, folder)):
            try:
                return cls.from_pretrained(model, subfolder=folder, **loading_options(model))
            except (OSError, ValueError) as error:
                raise RecipeError(
                    f"cannot load the {folder} of model={model}: {reason(error)} (a hub "
                    "id needs a network or a cached copy; a path needs a folder that a diffusers "
                    "pipeline was saved to)"
                ) from error

    unet = load(UNet2DConditionModel, "unet")
    tokenizers = [load(CLIPTokenizer, "tokenizer")]
    text_encoders = [load(CLIPTextModel, "text_encoder")]
    if unet.config.addition_embed_type == "text_time":
        tokenizers.append(load(CLIPTokenizer, "tokenizer_2"))
        text_encoders.append(load(CLIPTextModelWithProjection, "text_encoder_2"))
    vae, scheduler = load(AutoencoderKL, "vae"), load(DDPMScheduler, "scheduler")
    settings = DDPMScheduler.load_config(model, subfolder="scheduler", **loading_options(model))
    # DDPM, which trains, needs many more steps for an image than what pipelines come with.
    sampler = load(getattr(diffusers, settings["_class_name"], DDPMScheduler), "scheduler")
    return Parts(tokenizers, text_encoders, vae, unet, scheduler, sampler)


def small_parts(architecture: str, image_size: int) -> Parts:
    """Random weights in the real classes: "sd15", "sd21" (predicts v) or "sdxl", all tiny."""
    vae_class, unet_class, scheduler_class = (
        _untyped(AutoencoderKL),
        _untyped(UNet2DConditionModel),
        _untyped(DDPMScheduler),
    )
    tokenizer, width = small_tokenizer(), 32
    text_encoders = [_small_text_encoder(CLIPTextModel, tokenizer, width)]
    extra: dict[str, Any] = {"cross_attention_dim": width}
    if architecture == "sdxl":
        text_encoders.append(_small_text_encoder(CLIPTextModelWithProjection, tokenizer, width))
        extra = {
            "cross_attention_dim": 2 * width,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + width,
            "transformer_layers_per_block": (1, 1),
        }
    vae = vae_class(
        block_out_channels=(16, 32, 32),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=4,
        sample_size=image_size,
    )
    unet = unet_class(
        sample_size=image_size // 4,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        layers_per_block=1,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        use_linear_projection=architecture != "sd15",
        **extra,
    )
    scheduler = scheduler_class(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        steps_offset=1,
        prediction_type="v_prediction" if architecture == "sd21" else "epsilon",
    )
    return Parts([tokenizer] * len(text_encoders), text_encoders, vae, unet, scheduler)


def fit_vae(vae: Any, images: Sequence[torch.Tensor], steps: int = 60) -> None:
    """Let a VAE of random weights learn to give these images back, or its latents mean nothing."""
    torch.manual_seed(0)
    vae.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, fused=True)
    whole = torch.stack(list(images)).to(vae.device)
    for _ in range(steps):
        batch = whole[torch.randint(len(whole), (4,))]
        posterior = vae.encode(batch).latent_dist
        given = vae.decode(posterior.sample()).sample
        loss = (given - batch).square().mean() + 1e-4 * posterior.kl().mean() / batch[0].numel()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    vae.requires_grad_(False).eval()
    with torch.no_grad():
        spread = vae.encode(whole).latent_dist.mean.std()
    vae.register_to_config(scaling_factor=1 / float(spread))


def small_tokenizer() -> Any:
    """CLIP's tokenizer with a vocabulary of bytes: no merges, so no file is needed."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [
        *alphabet,
        *(letter + "</w>" for letter in alphabet),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return _untyped(CLIPTokenizer)(vocab=vocabulary, merges=[], model_max_length=_TEXT_LENGTH)


def _small_text_encoder(cls: Any, tokenizer: Any, width: int) -> Any:
    return cls(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=_TEXT_LENGTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def add_lora(model: Any, rank: int, *, is_unet: bool) -> None:
    """Freeze a UNet or a text encoder and put LoRA on its attentions."""
    model.requires_grad_(False)
    targets = _UNET_TARGETS if is_unet else _TEXT_TARGETS
    model.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=targets)
    )


def save_lora(parts: Parts, folder: Path, *, with_text: bool) -> None:
    """Write the adapters in diffusers' format: ``pipeline.load_lora_weights(folder)`` reads it."""

    convert: Any = convert_state_dict_to_diffusers

    def layers(model: Any) -> Any:
        return convert(get_peft_model_state_dict(model))

    saving: Any = StableDiffusionXLPipeline if parts.is_xl else StableDiffusionPipeline
    text = {"text_encoder_lora_layers": layers(parts.text_encoders[0])} if with_text else {}
    saving.save_lora_weights(folder, unet_lora_layers=layers(parts.unet), **text)


def tokenize(parts: Parts, prompts: list[str]) -> torch.Tensor:
    """int64 [text encoders, prompts, tokens], each padded to its tokenizer's length."""
    return torch.stack(
        [
            tokenizer(
                prompts,
                padding="max_length",
                max_length=tokenizer.model_max_length,
                truncation=True,
                return_tensors="pt",
            )["input_ids"]
            for tokenizer in parts.tokenizers
        ]
    )


def encode_text(text_encoders: list[Any], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encode prompts for the UNet: "text" [prompts, tokens, width], SDXL also "pooled"."""
    if len(text_encoders) == 1:
        return {"text": text_encoders[0](ids[0])[0]}
    found = [
        encoder(own, output_hidden_states=True)
        for encoder, own in zip(text_encoders, ids, strict=True)
    ]
    states = [output.hidden_states[-2] for output in found]
    return {"text": torch.cat(states, dim=-1), "pooled": found[1].text_embeds}


def denoise(
    unet: Any,
    noisy: torch.Tensor,
    timesteps: torch.Tensor,
    text: dict[str, torch.Tensor],
    size: int,
) -> torch.Tensor:
    """The UNet's prediction, of the shape of ``noisy``; ``size`` is the image's side in pixels."""
    extra = {}
    if "pooled" in text:
        # Original size, crop's corner, target size: nothing was cut off.
        times = torch.tensor([size, size, 0, 0, size, size], device=noisy.device)
        extra["added_cond_kwargs"] = {
            "text_embeds": text["pooled"],
            "time_ids": times.to(noisy.dtype).repeat(len(noisy), 1),
        }
    predicted: torch.Tensor = unet(
        noisy, timesteps, encoder_hidden_states=text["text"], **extra
    ).sample
    return predicted


def target_of(
    scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
) -> torch.Tensor:
    """Return what the scheduler's ``prediction_type`` has the UNet predict."""
    kind = scheduler.config.prediction_type
    if kind == "epsilon":
        return noise
    if kind == "v_prediction":
        velocity: torch.Tensor = scheduler.get_velocity(latents, noise, timesteps)
        return velocity
    if kind == "sample":
        return latents
    raise RecipeError(
        f"the scheduler's prediction_type is {kind!r}; known: epsilon, v_prediction, sample"
    )


@torch.no_grad()
def encode_images(
    parts: Parts, images: Sequence[torch.Tensor], device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The VAE's posterior of each image, once: it does not change while training."""
    vae, found = parts.vae.to(device), []
    for image in images:
        posterior = vae.encode(image[None].to(device)).latent_dist
        found.append((posterior.mean[0].cpu(), posterior.std[0].cpu()))
    return found


def to_device(parts: Parts, device: torch.device) -> None:
    """Move every model of the pipeline."""
    for model in (parts.vae, parts.unet, *parts.text_encoders):
        model.to(device)


def _untyped(cls: Any) -> Any:
    """diffusers' classes get their arguments from decorators that are not typed."""
    return cls
