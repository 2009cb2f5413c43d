"""transformers: a model returns a cache of keys and values unless it is told not to.

In training as well, where nobody goes on from it.
"""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from deepytorch_core.compile.fixes import Around, Fix, register_fix
from deepytorch_core.compile.fixes._transformers import is_transformers


@register_fix
class UnusedCache(Fix):
    name = "no cache of keys and values in training"

    def around(self, model: nn.Module) -> Around | None:
        if not is_transformers(model):
            return None
        takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
        # Layers of one number share a place in the cache, and then see more with it than without.
        if not takes_cache or _has_twins(model):
            return None

        def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            if _is_trained(model, kwargs):
                kwargs.setdefault("use_cache", False)
            return contextlib.nullcontext()

        return around


def _has_twins(model: nn.Module) -> bool:
    """Whether layers were copied with their numbers, or are used more than once."""
    numbers = [
        (type(one), getattr(one, "layer_idx", None))
        for _, one in model.named_modules(remove_duplicate=False)
    ]
    numbered = [one for one in numbers if one[1] is not None]
    return len(set(numbered)) < len(numbered)


def _is_trained(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call is for its loss; a tuple would have another place for what comes after."""
    is_named = kwargs.get("return_dict", getattr(model.config, "return_dict", True))
    return bool(model.training and is_named and kwargs.get("labels") is not None)
