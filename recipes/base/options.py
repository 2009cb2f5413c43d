# SPDX-License-Identifier: Apache-2.0
"""The options that every recipe has; each recipe's own Config adds its model's and its data's."""

import math
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from deepytorch.recipes.base import paths
from deepytorch.recipes.base.config import RecipeError

_PACKAGES = {  # what an engine or a precision needs installed, and the extra that brings it
    "deepspeed": ("deepspeed", "deepspeed"),
    "accelerate": ("accelerate", "accelerate"),
    "megatron": ("megatron", "megatron"),
    "fp8": ("torchao", "fp8"),
}
_TRACKERS = {  # as accelerate names them, and the packages they need
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "comet_ml": "comet_ml",
    "aim": "aim",
    "clearml": "clearml",
    "dvclive": "dvclive",
    "swanlab": "swanlab",
}
_POSITIVE = ("batch_size", "accumulation", "max_grad_norm", "keep_checkpoints")
_POSITIVE_IF_GIVEN = ("steps", "epochs", "learning_rate", "processes", "loss_tolerance")
_FLAT_OPTIMIZERS = ("adamw", "sgd")  # that need not see a weight as a whole


_NumberT = TypeVar("_NumberT", int, float)


def _settled(value: _NumberT | None) -> _NumberT:
    if value is None:
        raise ValueError("the options leave this open, and nothing has settled it yet")
    return value


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
    processes: int | None = None
    seed: int = 42
    epochs: float | None = None
    steps: int | None = None
    batch_size: int = 4
    accumulation: int = 1
    learning_rate: float | None = None
    schedule: Literal[
        "cosine",
        "linear",
        "constant",
        "constant_with_warmup",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "warmup_stable_decay",
    ] = "cosine"
    warmup_steps: int | None = None
    optimizer: Literal[
        "adamw", "muon", "sgd", "adafactor", "adamw_8bit", "paged_adamw_8bit", "lion_8bit"
    ] = "adamw"
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    gradient_checkpointing: bool = False
    kernels: Literal["auto", "on", "off"] = "auto"
    compile: Literal["auto", "inductor", "off"] = "auto"
    evaluate_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 1
    resume: str | None = None
    trackers: str | None = "tensorboard"
    loss_tolerance: float | None = None
    rounding_arm: bool = False

    demo_steps: ClassVar[int] = 50
    """On the embedded data; data of the user's own is trained `own_epochs` or `own_steps`."""
    own_epochs: ClassVar[float | None] = 3.0
    own_steps: ClassVar[int | None] = None
    tolerance: ClassVar[float] = 1e-4
    """A comparison's in fp32, where loss_tolerance leaves it open."""

    def __post_init__(self) -> None:
        self.require_positive(*_POSITIVE)
        self.require_positive(
            *(key for key in _POSITIVE_IF_GIVEN if getattr(self, key) is not None)
        )
        self.require_not_negative("evaluate_every", "save_every")
        if self.warmup_steps is not None:
            self.require_not_negative("warmup_steps")
        if self.steps is not None and self.epochs is not None:
            raise RecipeError("steps and epochs at once: leave one out")
        if self.epochs == math.inf:
            raise RecipeError("epochs must be finite, not inf")
        if self.optimizer not in _FLAT_OPTIMIZERS and self.engine not in ("ddp", "accelerate"):
            raise RecipeError(
                f"engine={self.engine} keeps parts of weights on each rank, which "
                f"optimizer={self.optimizer} can't train: use adamw, or engine=ddp"
            )
        for name in self.tracker_names:
            if name not in _TRACKERS:
                raise RecipeError(
                    f"trackers={name}: no tracker of that name; known: {', '.join(_TRACKERS)}, "
                    "several with commas between them"
                )
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

    @property
    def data_is_own(self) -> bool:
        """Whether the data is the user's, not what the recipe has embedded."""
        return getattr(self, "data", None) is not None

    @property
    def is_own(self) -> bool:
        """Whether the model or the data is the user's."""
        return self.data_is_own or getattr(self, "model", None) is not None

    @property
    def usual_steps(self) -> int | None:
        """Steps where neither they nor epochs are asked for; None: it goes by `usual_epochs`."""
        return self.own_steps if self.data_is_own else self.demo_steps

    @property
    def usual_epochs(self) -> float | None:
        """Epochs where neither they nor steps are asked for; None: it goes by `usual_steps`."""
        return self.own_epochs if self.data_is_own else None

    @property
    def total_steps(self) -> int:
        """The steps of the run; they are known since `length.settle_length`."""
        return _settled(self.steps)

    @property
    def total_warmup_steps(self) -> int:
        """As `total_steps`."""
        return _settled(self.warmup_steps)

    @property
    def total_tolerance(self) -> float:
        """The loss tolerance, which is known since `length.settle_device`."""
        return _settled(self.loss_tolerance)

    @property
    def tracker_names(self) -> list[str]:
        """The trackers that are asked for."""
        return [name for tracker in (self.trackers or "").split(",") if (name := tracker.strip())]

    def check_start(self, *, compare: bool) -> None:
        """RecipeError for what can be known to fail before a process starts, files included."""
        if compare:
            self.check_compare()
        for key, value in (("engine", self.engine), ("precision", self.precision)):
            package, extra = _PACKAGES.get(value, ("", ""))
            if package and util.find_spec(package) is None:
                raise RecipeError(
                    f"{key}={value} needs {package}, which is not installed: "
                    f"pip install 'deepytorch-train[{extra}]'"
                )
        if self.optimizer.endswith("8bit") and util.find_spec("bitsandbytes") is None:
            raise RecipeError(
                f"optimizer={self.optimizer} needs bitsandbytes, which is not installed: "
                "pip install bitsandbytes"
            )
        for name in self.tracker_names:
            if util.find_spec(_TRACKERS[name]) is None:
                raise RecipeError(
                    f"trackers={name} needs it installed: pip install {_TRACKERS[name]}"
                )
        paths.refuse_wrong_output(Path(self.output_dir))
        if self.resume is not None:
            paths.refuse_wrong_resume(self.resume, self.name)
        self.check_files()

    def check_files(self) -> None:
        """RecipeError for a model or data that can't be what the recipe needs."""

    def check_compare(self) -> None:
        """RecipeError for options that a comparison can't have."""
        if self.resume is not None:
            raise RecipeError(
                f"--compare trains both arms from the start, which resume={self.resume} does "
                "not: leave resume out"
            )
        if self.engine != "ddp":
            raise RecipeError(
                f"--compare trains both arms in the same processes, which engine={self.engine} "
                "does not allow: use engine=ddp, or run backend=stock and backend=deepytorch"
            )

    def check_device(self, *, has_gpu: bool) -> None:
        """RecipeError for options that the device does not have."""
        on_cpu = self.device == "cpu" or not has_gpu
        if self.device == "cuda" and not has_gpu:
            raise RecipeError("device=cuda, and this machine shows no GPU: set device=cpu")
        if on_cpu and self.precision == "fp16":
            raise RecipeError("precision=fp16 needs a GPU: use bf16 or fp32 on the CPU")
        if on_cpu and self.engine == "megatron":
            raise RecipeError("engine=megatron needs a GPU: use engine=ddp or deepspeed on the CPU")
        if on_cpu and self.offload != "none":
            raise RecipeError(f"offload={self.offload} moves from a GPU: leave it out on the CPU")

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
