"""What keeps known libraries' models from being replayed, left out of captured passes.

transformers: a causal model that is called without a mask looks at its position ids, which it has
just counted up itself, whether they begin anew within a row, as those of packed sequences do. That
waits for the GPU, and a pass that waits can't be replayed as a CUDA graph (`capture`). And it
returns a cache of keys and values unless it is told not to, in training as well, where nobody goes
on from it. Decoders of the BART kind make a mask of ones where there is none, which is then looked
at; where they are traced by a compiler they leave it out, to the same effect.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from deepytorch_core.compile.region import Forward

_LOOKS = "find_packed_sequence_indices"
_ASKS = "is_torchdynamo_compiling"
_MAKES_MASK = "mask_seq_length"  # a variable of who makes a mask of ones

# One pass at a time has its function in transformers' file.
_one = threading.RLock()


def without(root: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """What computes as `forward`, the module's, does; `forward` itself where nothing is known."""
    transformers = sys.modules.get("transformers.modeling_utils")
    base_of = getattr(root, "get_base_model", None)  # peft's
    model = base_of() if callable(base_of) else root
    # Compiled code would be compiled anew for another function in the same place.
    if (
        transformers is None
        or not isinstance(model, transformers.PreTrainedModel)
        or isinstance(forward, Forward)
    ):
        return forward

    takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
    # Layers of one number share a place in the cache, and then see more with it than without.
    takes_cache = takes_cache and not _has_twins(model)
    files = {sys.modules.get(type(one).__module__) for one in model.modules()}
    asking = [file for file in files if hasattr(file, _ASKS)]

    def run(*args: Any, **kwargs: Any) -> Any:
        if takes_cache and _is_trained(model, kwargs):
            kwargs.setdefault("use_cache", False)
        counts_itself = len(args) <= 1 and not any(
            "position" in name and value is not None for name, value in kwargs.items()
        )
        look = _without_look() if counts_itself else contextlib.nullcontext()
        with look, _without_masks(asking):
            return forward(*args, **kwargs)

    return run


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


@contextlib.contextmanager
def _without_look() -> Iterator[None]:
    """While open, position ids in this thread are taken to go on to the end of each row."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, _LOOKS):
        yield
        return
    own = threading.get_ident()

    def known(position_ids: Any) -> Any:
        return None if threading.get_ident() == own else look(position_ids)

    with _one:
        look = getattr(masks, _LOOKS)
        setattr(masks, _LOOKS, known)
        try:
            yield
        finally:
            setattr(masks, _LOOKS, look)


@contextlib.contextmanager
def _without_masks(files: list[Any]) -> Iterator[None]:
    """While open, models of these files make no masks of ones in this thread."""
    if not files:
        yield
        return
    own = threading.get_ident()

    def instead_of(ask: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            frame = sys._getframe(1)
            makes_mask = (
                _MAKES_MASK in frame.f_code.co_varnames
                and frame.f_locals.get("attention_mask", frame) is None
            )
            return (makes_mask and threading.get_ident() == own) or ask()

        return answer

    with _one:
        asks = [getattr(file, _ASKS) for file in files]
        for file, ask in zip(files, asks, strict=True):
            setattr(file, _ASKS, instead_of(ask))
        try:
            yield
        finally:
            for file, ask in zip(files, asks, strict=True):
                setattr(file, _ASKS, ask)
