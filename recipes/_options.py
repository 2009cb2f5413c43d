# SPDX-License-Identifier: Apache-2.0
"""The options that every recipe has; each recipe's own Config adds its model's and its data's."""

import math
from dataclasses import dataclass
from typing import Literal

from deepytorch.recipes._config import RecipeError

_POSITIVE = ("steps", "batch_size", "accumulation", "max_grad_norm", "keep_checkpoints")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """configs/*.yaml say what each one means."""

    name: str
    output_dir: str = "runs"
    backend: Literal["deepytorch", "stock"] = "deepytorch"
    engine: Literal["ddp", "fsdp2", "deepspeed", "accelerate", "megatron"] = "ddp"
    zero_stage: Literal[1, 2, 3] = 2
    offload: Literal["none", "optimizer", "parameters"] = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 42
    steps: int = 50
    batch_size: int = 4
    accumulation: int = 1
    learning_rate: float | None = None
    warmup_steps: int = 5
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    gradient_checkpointing: bool = False
    kernels: Literal["auto", "on", "off"] = "off"
    compile: Literal["auto", "inductor", "off"] = "off"
    evaluate_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 1
    resume: str | None = None
    wandb: bool = False
    loss_tolerance: float = 1e-4
    rounding_arm: bool = False

    def __post_init__(self) -> None:
        self.require_positive(*_POSITIVE)
        self.require_not_negative("warmup_steps", "evaluate_every", "save_every")
        if self.learning_rate is not None:
            self.require_positive("learning_rate")
        if self.learning_rate == math.inf:
            raise RecipeError("learning_rate must be finite, not inf")
        if not 0 <= self.seed < 2**63:
            raise RecipeError(f"seed must be 0 or more and below 2**63, not {self.seed}")
        if not 0 <= self.weight_decay < math.inf:  # nor is nan
            raise RecipeError(f"weight_decay must be 0 or more and finite, not {self.weight_decay}")
        if self.engine == "megatron" and self.precision == "fp16":
            raise RecipeError("engine=megatron has no precision=fp16: use bf16, or engine=ddp")
        if self.engine == "megatron" and self.device == "cpu":
            raise RecipeError("engine=megatron needs a GPU: use engine=ddp or deepspeed on the CPU")
        if self.precision == "fp8" and self.engine not in ("ddp", "accelerate", "fsdp2"):
            raise RecipeError(
                f"engine={self.engine} has no precision=fp8: use engine=ddp, accelerate or fsdp2"
            )
        if self.offload != "none" and self.engine not in ("deepspeed", "fsdp2"):
            raise RecipeError(
                f"offload={self.offload} needs engine=deepspeed or engine=fsdp2, not {self.engine}"
            )
        if self.offload == "parameters" and self.engine == "deepspeed" and self.zero_stage != 3:
            raise RecipeError("offload=parameters under DeepSpeed needs zero_stage=3")

    def require_not_negative(self, *keys: str) -> None:
        """RecipeError naming the first of ``keys`` that is below 0."""
        for key in keys:
            if getattr(self, key) < 0:
                raise RecipeError(f"{key} must be 0 or more, not {getattr(self, key)}")

    def require_share(self, key: str) -> None:
        """RecipeError if ``key`` is no share of which something is left: from 0 to below 1."""
        if not 0 <= getattr(self, key) < 1:  # nor is nan
            raise RecipeError(f"{key} must be 0 or more and below 1, not {getattr(self, key)}")

    def require_positive(self, *keys: str) -> None:
        """RecipeError naming the first of ``keys`` that is not above 0."""
        for key in keys:
            if not getattr(self, key) > 0:  # nor is nan
                raise RecipeError(f"{key} must be greater than 0, not {getattr(self, key)}")
