# SPDX-License-Identifier: Apache-2.0
"""precision=fp8: training's large matrix products in 8-bit floats, by torchao.

Inputs, weights and gradients are scaled to the range of float8 (e4m3, gradients e5m2). The scales
are found tensor by tensor, anew at each product (Micikevicius et al., "FP8 Formats for Deep
Learning", 2022). Weights, optimizer and checkpoints stay as they are, and the rest runs under
autocast in bf16. It rounds more than bf16 does, so it is never chosen for anybody.
"""

from typing import Any

import torch
from torch import nn

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process, console

# The hardware's products take multiples of this; smaller layers gain nothing by them.
_MULTIPLE = 16
# Ada is the first that has them.
_LEAST_CAPABILITY = (8, 9)


def convert(model: nn.Module, options: RunOptions, process: Process) -> None:
    """Let the model's linear layers compute in float8; in place, with the same state_dict.

    Left alone: the output layer, whose rounding the loss would feel most, and layers with a side
    that is no multiple of 16. Raises RecipeError where torchao, the GPU, or any such layer is
    missing. On the CPU float8 is emulated, to try a recipe there.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise RecipeError(
            "precision=fp8 needs torchao: pip install 'deepytorch-train[fp8]'"
        ) from error
    device = process.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise RecipeError(
            "precision=fp8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper, "
            f"Blackwell), not {torch.cuda.get_device_name(device)}: use precision=bf16"
        )
    find_output: Any = getattr(model, "get_output_embeddings", None)
    output = find_output() if find_output else None

    def is_converted(layer: nn.Module, name: str) -> bool:
        return layer is not output and _fits(layer)

    if not any(is_converted(layer, name) for name, layer in model.named_modules()):
        raise RecipeError(
            f"precision=fp8: {type(model).__name__} has no linear layer with both sides a multiple "
            f"of {_MULTIPLE}: use precision=bf16"
        )
    emulated = device.type == "cpu"
    config = Float8LinearConfig(emulate=emulated, pad_inner_dim=not emulated)
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
    if options.compile == "off" and process.is_main and not emulated:
        console.print("precision=fp8 gains little without compile=auto, which fuses the scaling")


def _fits(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and layer.in_features % _MULTIPLE == 0
        and layer.out_features % _MULTIPLE == 0
    )
