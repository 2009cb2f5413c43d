# SPDX-License-Identifier: Apache-2.0
"""Each recipe's options.

Nothing heavy is imported here: the command checks them before it starts a process.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from deepytorch.recipes.base import paths
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.data.conversations import refuse_wrong_data
from deepytorch.recipes.data.pairs import refuse_wrong_pairs


@dataclass(frozen=True, kw_only=True)
class ChatOptions(RunOptions):
    """Options of the recipes that train causal language models."""

    model: str | None = None
    data: str | None = None
    max_length: int = 512
    held_out: int = 4
    sample_tokens: int = 120

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("max_length", "held_out", "sample_tokens")

    def check_files(self) -> None:
        """As in RunOptions: the model, and the first records of the data."""
        if self.model is not None:
            paths.refuse_wrong_model(self.model)
        if self.data is not None:
            self.check_data(self.data)

    def check_data(self, data: str) -> None:
        """RecipeError for data that is missing, or whose first records are wrong."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(ChatOptions):
    """Options of the recipes that fine-tune on instructions."""

    data_format: Literal["auto", "alpaca", "sharegpt", "prompt", "text"] = "auto"
    train_on_prompt: bool = False
    packing: Literal["none", "batch", "fixed"] = "batch"
    padding_free: Literal["auto", "on", "off"] = "auto"
    token_balance: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing == "fixed" and self.padding_free == "off":
            raise RecipeError("packing=fixed trains rows without padding: leave padding_free=auto")

    def check_data(self, data: str) -> None:
        """As in ChatOptions."""
        refuse_wrong_data(data, self.data_format)

    def padding_free_of(self, ours: bool) -> str:
        """How the arm of a comparison packs; rows that were filled beforehand need it in both."""
        if self.packing == "none" or not (ours or self.packing == "fixed"):
            return "off"
        return self.padding_free

    def why_no_balance(self, world_size: int) -> str | None:
        """Why each rank computes the examples that it draws; None where they are dealt out."""
        if self.token_balance == "off":
            return "token_balance=off"
        if world_size * self.accumulation == 1:
            return "there is one rank and one micro-batch a step, so nothing to balance"
        if self.token_balance == "auto" and self.padding_free_of(True) == "off":
            return "batches are padded, so their tokens are not what they cost"
        if self.token_balance == "auto" and self.packing == "fixed":
            return "rows are filled already"
        return None


@dataclass(frozen=True, kw_only=True)
class LlamaOptions(TextOptions):
    """Options of llama_sft; configs/llama_sft.yaml says what each one means."""

    name: str = "llama_sft"
    hidden_size: int = 256
    intermediate_size: int = 688
    num_layers: int = 4
    num_heads: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("hidden_size", "intermediate_size", "num_layers", "num_heads")
        if self.hidden_size % (2 * self.num_heads):
            raise RecipeError(
                f"hidden_size={self.hidden_size} must be a multiple of 2 * num_heads "
                f"({2 * self.num_heads}), so that every head has an even size"
            )


@dataclass(frozen=True, kw_only=True)
class LoraOptions(ChatOptions):
    """Options of the recipes that train adapters, and the shape of a small Qwen3."""

    method: Literal["lora", "full", "qlora"] = "lora"
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    merge_adapter: bool = False
    hidden_size: int = 192
    num_layers: int = 3
    num_heads: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("lora_r", "lora_alpha", "hidden_size", "num_layers", "num_heads")
        self.require_share("lora_dropout")
        if self.hidden_size % (2 * self.num_heads):
            raise RecipeError(
                f"hidden_size={self.hidden_size} must be a multiple of 2 * num_heads "
                f"({2 * self.num_heads}), so that every head has an even size"
            )
        if self.method == "qlora":
            raise RecipeError(
                "method=qlora is not supported: its 4-bit weights need kernels of their own. Use "
                "method=lora precision=bf16: the frozen weights are then kept in bf16, 2 bytes "
                "each; if that is too much, gradient_checkpointing=true or more GPUs with "
                "engine=fsdp2"
            )
        if self.method == "full" and self.merge_adapter:
            raise RecipeError("merge_adapter=true needs method=lora: method=full has no adapter")


@dataclass(frozen=True, kw_only=True)
class QwenOptions(LoraOptions, TextOptions):
    """Options of qwen_lora; configs/qwen_lora.yaml says what each one means."""

    name: str = "qwen_lora"


@dataclass(frozen=True, kw_only=True)
class DpoOptions(LoraOptions):
    """Options of dpo; configs/dpo.yaml says what each one means."""

    name: str = "dpo"
    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("beta")
        if self.beta == math.inf:
            raise RecipeError("beta must be finite, not inf")

    def check_data(self, data: str) -> None:
        """As in ChatOptions."""
        refuse_wrong_pairs(data)


@dataclass(frozen=True, kw_only=True)
class BertOptions(RunOptions):
    """Options of bert_mlm; configs/bert_mlm.yaml says what each one means."""

    name: str = "bert_mlm"
    demo_steps: ClassVar[int] = 150
    batch_size: int = 16
    model: str | None = None
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    dropout: float = 0.0
    data: str | None = None
    max_length: int = 128
    held_out: int = 32
    padding_free: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("hidden_size", "num_layers", "num_heads", "max_length", "held_out")
        self.require_share("dropout")
        if self.hidden_size % self.num_heads:
            raise RecipeError(
                f"hidden_size={self.hidden_size} must be a multiple of num_heads={self.num_heads}"
            )

    def check_files(self) -> None:
        """As in RunOptions."""
        if self.model is not None:
            paths.refuse_wrong_model(self.model)
        if self.data is not None:
            paths.refuse_missing("data", Path(self.data))


@dataclass(frozen=True, kw_only=True)
class ResnetOptions(RunOptions):
    """Options of resnet50_ddp; configs/resnet50_ddp.yaml says what each one means."""

    name: str = "resnet50_ddp"
    batch_size: int = 16
    model: str | None = None
    width: int = 8
    data: str | None = None
    image_size: int = 48
    num_workers: int = 0
    held_out: int = 64
    tolerance: ClassVar[float] = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("width", "image_size", "held_out")
        self.require_not_negative("num_workers")
        if self.engine == "fsdp2":
            raise RecipeError(
                "engine=fsdp2 does not shard a ResNet's batch norms: use ddp, deepspeed or "
                "accelerate"
            )

    def check_files(self) -> None:
        """As in RunOptions."""
        if self.data is not None:
            paths.refuse_wrong_folder("data", Path(self.data))


@dataclass(frozen=True, kw_only=True)
class DreamboothOptions(RunOptions):
    """Options of stable_diffusion_dreambooth; its YAML in configs/ says what each one means."""

    name: str = "stable_diffusion_dreambooth"
    demo_steps: ClassVar[int] = 80
    own_epochs: ClassVar[float | None] = None  # a few images are seen hundreds of times
    own_steps: ClassVar[int | None] = 400
    batch_size: int = 4
    model: str | None = None
    architecture: Literal["sd15", "sd21", "sdxl"] = "sd21"
    method: Literal["full", "lora"] = "full"
    lora_r: int = 16
    train_text_encoder: bool = False
    data: str | None = None
    instance_prompt: str = "a photo of sks officer"
    class_prompt: str = "a photo of an officer"
    class_data: str | None = None
    num_class_images: int = 8
    prior_weight: float = 1.0
    image_size: int = 64
    sample_steps: int = 20
    tolerance: ClassVar[float] = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("lora_r", "image_size", "sample_steps")
        if self.image_size % 8:
            raise RecipeError(f"image_size={self.image_size} must be a multiple of 8")
        is_weight = 0 <= self.prior_weight < math.inf  # nan is none
        if not is_weight or (self.prior_weight > 0 and self.num_class_images < 1):
            raise RecipeError(
                "prior preservation needs a finite prior_weight >= 0 and num_class_images >= 1"
            )

    def check_files(self) -> None:
        """As in RunOptions."""
        if self.model is not None:
            paths.refuse_wrong_model(self.model, kind="diffusers")
        if self.data is not None:
            paths.refuse_wrong_folder("data", Path(self.data))


OPTIONS: dict[str, type[RunOptions]] = {
    "llama_sft": LlamaOptions,
    "qwen_lora": QwenOptions,
    "dpo": DpoOptions,
    "bert_mlm": BertOptions,
    "resnet50_ddp": ResnetOptions,
    "stable_diffusion_dreambooth": DreamboothOptions,
}
