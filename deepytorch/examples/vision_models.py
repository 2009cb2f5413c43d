"""Classifiers of torchvision and timm by name, without their weights."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch_core.base.console import say_once

if TYPE_CHECKING:
    from torch import nn

LIBRARIES = ("torchvision", "timm")
_IMAGE_SIZE = 224


class UnknownModelError(ValueError):
    """No library has a model of this name, or a library is missing; one line, with the remedy."""


@dataclass(frozen=True)
class VisionModel:
    """A model that can be made: `make(num_classes)` gives one with random weights."""

    name: str
    library: str
    image_size: int
    make: Callable[[int], nn.Module]


def names() -> list[str]:
    """All models of the installed libraries, as `load` takes them."""
    found = []
    for library in LIBRARIES:
        module = _installed(library)
        if module is not None:
            found += [f"{library}/{name}" for name in _names_in(library, module)]
    if not found:
        raise UnknownModelError("no models: pip install torchvision timm")
    return found


def load(wanted: str, image_size: int | None = None) -> VisionModel:
    """The model called `wanted` ("resnet50", or "timm/resnet50" for timm's).

    Args:
        wanted: its name; torchvision comes first where both libraries have one.
        image_size: pixels of a side; default: what its weights were trained with.

    Raises UnknownModelError naming close matches, or the library to install.
    """
    prefix, _, rest = wanted.partition("/")
    libraries, name = ((prefix,), rest) if prefix in LIBRARIES else (LIBRARIES, wanted)
    missing, known = [], []
    for library in libraries:
        module = _installed(library)
        if module is None:
            missing.append(library)
            continue
        own = _names_in(library, module)
        if name in own:
            make = _torchvision if library == "torchvision" else _timm
            return make(module, name, image_size)
        known += own
    close = difflib.get_close_matches(name, dict.fromkeys(known), n=3)
    text = f"no model {wanted!r}" + (f" (did you mean {', '.join(close)}?)" if close else "")
    if missing:
        text += f"; not installed: pip install {' '.join(missing)}"
    raise UnknownModelError(text if missing else f"{text}; --model list prints all names")


def _installed(library: str) -> Any:
    """The library's module with its models; None when it is not installed."""
    if find_spec(library) is None:
        return None
    # timm imports it too.
    _do_without_compiled_torchvision()
    return import_module(f"{library}.models" if library == "torchvision" else library)


@functools.cache
def _do_without_compiled_torchvision() -> Any:
    """Let a torchvision be imported that was compiled for another build of torch.

    It comes about when torch is a CPU build and torchvision is not. Its import describes two
    operators of its compiled part, which classifiers don't use, and fails if they are unknown.
    They are known as long as what this returns is alive.
    """
    import torch

    own: Any = torch  # what is used of it here has no annotations
    found = find_spec("torchvision")
    folders = [] if found is None else found.submodule_search_locations or []
    try:
        for folder in folders:
            for path in Path(folder).glob("_C*.so"):
                own.ops.load_library(path)
    except OSError:
        say_once(
            "torchvision was built for another torch: using it without its compiled operators, "
            "which classifiers don't need",
            level="warning",
        )
        definitions = own.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            definitions.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        return definitions
    return None


def _names_in(library: str, module: Any) -> list[str]:
    # torchvision's classifiers are those of this module itself, not of its parts.
    found = module.list_models(module=module) if library == "torchvision" else module.list_models()
    return list(found)


def _torchvision(module: Any, name: str, image_size: int | None) -> VisionModel:
    if image_size is None:
        weights = module.get_model_weights(name).DEFAULT
        image_size = int(weights.transforms().crop_size[0])

    def make(num_classes: int) -> nn.Module:
        model: nn.Module = module.get_model(name, weights=None, num_classes=num_classes)
        return model

    return VisionModel(name, "torchvision", image_size, make)


def _timm(module: Any, name: str, image_size: int | None) -> VisionModel:
    if image_size is None:
        defaults = module.get_pretrained_cfg(name)
        image_size = int(defaults.input_size[-1]) if defaults else _IMAGE_SIZE

    def make(num_classes: int) -> nn.Module:
        model: nn.Module = module.create_model(name, pretrained=False, num_classes=num_classes)
        return model

    return VisionModel(name, "timm", image_size, make)
