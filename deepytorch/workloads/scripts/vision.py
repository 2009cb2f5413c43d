"""Register scripts that train with timm, diffusers, Accelerate and Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepytorch.workloads.scripts import images, text
from deepytorch.workloads.scripts.script import Script, Size

_TIMM = "aa4b5850c1543fa488abf260f18390eda46cf85d"
_DIFFUSERS = "58eb52c0803ea9af3abec60841c2a093bdf1f951"
_ACCELERATE = "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
_LIGHTNING = "7f0c3436cd3f6ad3753125672024fc415cbcb414"

_DIFFUSER_PACKAGES = ("diffusers", "transformers", "accelerate", "datasets", "torchvision")
# cv_example.py asks timm for these weights, which timm finds in the Hugging Face Hub's cache.
_PRETRAINED = "models--timm--resnet50d.ra2_in1k"
_REVISION = "0" * 40
_UNET: dict[Size, dict[str, Any]] = {
    "full": {
        **{"sample_size": 64, "cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20)},
        "block_out_channels": (320, 640, 1280, 1280),
    },
    "small": {
        **{"sample_size": 8, "cross_attention_dim": 32, "attention_head_dim": (1, 2, 2, 2)},
        **{"block_out_channels": (32, 64, 64, 64), "layers_per_block": 1},
    },
}
_VAE = {"full": (128, 256, 512, 512), "small": (32, 32, 32, 32)}
_CLIP: dict[Size, dict[str, Any]] = {
    "full": {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23},
        **{"num_attention_heads": 16, "vocab_size": 49_408},
    },
    "small": {
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "vocab_size": 512},
    },
}


def _classes(folder: Path, size: Size) -> None:
    classes, each, pixels = (100, 128, 256) if size == "full" else (4, 8, 40)
    images.image_folder(folder / "train", classes=classes, each=each, pixels=pixels)
    images.image_folder(folder / "validation", classes=classes, each=1, pixels=pixels)


def _flowers(folder: Path, size: Size) -> None:
    count, pixels = (4_000, 96) if size == "full" else (32, 40)
    images.jpegs(lambda number: folder / "images" / f"{number:05d}.jpg", count, pixels)


def _pets(folder: Path, size: Size) -> None:
    """Write named pictures, and random weights where timm looks for its pretrained ones."""
    import timm
    import torch
    from safetensors.torch import save_file

    count = 7_000 if size == "full" else 160
    images.jpegs(lambda number: folder / "images" / f"breed{number % 37}_{number}.jpg", count, 256)
    torch.manual_seed(images.SEED)
    model: Any = timm.create_model("resnet50d", pretrained=False)
    place = folder / "hub" / _PRETRAINED
    snapshot = place / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(_REVISION)
    save_file(model.state_dict(), snapshot / "model.safetensors")


def _stable_diffusion(folder: Path, size: Size) -> None:
    """Write pictures of one subject, and a pipeline of Stable Diffusion 2.1's shapes."""
    import torch
    from diffusers import (
        AutoencoderKL,
        DDPMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel

    pixels = 512 if size == "full" else 64
    images.jpegs(lambda number: folder / "subject" / f"{number}.jpg", 20, pixels)
    torch.manual_seed(images.SEED)
    blocks = len(_VAE[size])
    vae: Any = AutoencoderKL
    schedule: Any = DDPMScheduler
    unet: Any = UNet2DConditionModel
    tokenizer = text.tokenizer(folder / "tokenizer", vocabulary=512, longest=77)
    text_config: Any = CLIPTextConfig(
        **_CLIP[size],
        hidden_act="gelu",
        projection_dim=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    pipeline: Any = StableDiffusionPipeline
    pipeline(
        vae=vae(
            block_out_channels=_VAE[size],
            down_block_types=("DownEncoderBlock2D",) * blocks,
            up_block_types=("UpDecoderBlock2D",) * blocks,
            latent_channels=4,
            layers_per_block=2,
        ),
        text_encoder=CLIPTextModel(text_config),
        tokenizer=tokenizer,
        unet=unet(**_UNET[size], use_linear_projection=True),
        scheduler=schedule(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="epsilon",
            steps_offset=1,
            clip_sample=False,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "model")


def _wikitext(folder: Path, size: Size) -> None:
    (folder / "data").mkdir()
    # The script keeps 4,000 blocks of 35 words for validation and test.
    rows = text.lines(40_000 if size == "full" else 4_000, 50)
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(rows), encoding="utf-8")


def _timm(model: str) -> Script:
    both = ("--data-dir={data}", "--output={out}", f"--model={model}")
    return Script(
        name=f"timm-{model.replace('_', '-')}",
        repository="huggingface/pytorch-image-models",
        commit=_TIMM,
        path="train.py",
        arguments=(*both, "--num-classes=100", "--amp", "--batch-size=128", "--workers=8"),
        small=(
            *(*both, "--num-classes=4", "--img-size=32", "--batch-size=2", "--workers=1"),
            "--device=cpu",
        ),
        prepare=_classes,
        packages=("torchvision", "yaml", "huggingface_hub", "safetensors"),
    )


SCRIPTS = (
    _timm("resnet50"),
    _timm("convnext_tiny"),
    _timm("vit_base_patch16_224"),
    Script(
        name="diffusers-dreambooth-sd21",
        repository="huggingface/diffusers",
        commit=_DIFFUSERS,
        path="examples/dreambooth/train_dreambooth.py",
        arguments=(
            *("--pretrained_model_name_or_path={data}/model", "--instance_data_dir={data}/subject"),
            *("--output_dir={out}", "--instance_prompt=a photo of sks dog", "--resolution=512"),
            *("--train_batch_size=5", "--gradient_accumulation_steps=1", "--learning_rate=5e-6"),
            *("--lr_scheduler=constant", "--lr_warmup_steps=0", "--max_train_steps=1000000"),
            *("--checkpointing_steps=1000000", "--mixed_precision=fp16", "--seed=0"),
        ),
        small=(
            *("--pretrained_model_name_or_path={data}/model", "--instance_data_dir={data}/subject"),
            *("--output_dir={out}", "--instance_prompt=a photo of sks dog", "--resolution=64"),
            *("--train_batch_size=1", "--gradient_accumulation_steps=1", "--learning_rate=5e-6"),
            *("--lr_scheduler=constant", "--lr_warmup_steps=0", "--max_train_steps=1000000"),
            *("--checkpointing_steps=1000000", "--seed=0"),
        ),
        prepare=_stable_diffusion,
        packages=_DIFFUSER_PACKAGES,
        is_distributed=True,
    ),
    Script(
        name="diffusers-unconditional",
        repository="huggingface/diffusers",
        commit=_DIFFUSERS,
        path="examples/unconditional_image_generation/train_unconditional.py",
        arguments=(
            *("--train_data_dir={data}/images", "--resolution=64", "--center_crop"),
            *("--random_flip", "--output_dir={out}", "--train_batch_size=16", "--num_epochs=1000"),
            *("--gradient_accumulation_steps=1", "--use_ema", "--learning_rate=1e-4"),
            *("--lr_warmup_steps=500", "--mixed_precision=no", "--checkpointing_steps=1000000"),
            *("--save_images_epochs=100000", "--save_model_epochs=100000"),
            "--ddpm_num_inference_steps=1",
        ),
        small=(
            *("--train_data_dir={data}/images", "--resolution=32", "--output_dir={out}"),
            *("--train_batch_size=1", "--num_epochs=1000", "--checkpointing_steps=1000000"),
            *("--save_images_epochs=100000", "--save_model_epochs=100000"),
            *("--ddpm_num_inference_steps=1", "--eval_batch_size=1"),
        ),
        prepare=_flowers,
        packages=(*_DIFFUSER_PACKAGES, "tensorboard"),
        is_distributed=True,
    ),
    Script(
        name="accelerate-cv-resnet50d",
        repository="huggingface/accelerate",
        commit=_ACCELERATE,
        path="examples/cv_example.py",
        arguments=("--data_dir={data}/images", "--mixed_precision=bf16"),
        # The script has its model and its batch of 64 written into it: steps take seconds here.
        small=("--data_dir={data}/images", "--cpu"),
        prepare=_pets,
        packages=("accelerate", "timm", "torchvision"),
        is_distributed=True,
    ),
    Script(
        name="lightning-transformer",
        repository="Lightning-AI/pytorch-lightning",
        commit=_LIGHTNING,
        path="examples/pytorch/basics/transformer.py",
        arguments=(),
        small=(),
        prepare=_wikitext,
        packages=("lightning", "requests"),
        folder="{data}",
    ),
)
