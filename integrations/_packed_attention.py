"""transformers' attention interface, taught attention without padding.

Registered is one name for each attention that a model may have had. Under that name a call that
brings `cu_seq_lens_q` goes to `deepytorch_core.data.varlen_attention`; any other call goes to the
model's former attention with its former mask. So a model stays right whatever it is given, also in
the recomputation of activation checkpoints, which happens long after the forward pass.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from deepytorch_core.data import varlen_attention

_PREFIX = "deepytorch_varlen_over_"
# What attentions take besides, and packed ones here can't do; by their argument's name.
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask", "cache")


class _Running(threading.local):
    """What is known of the forward pass that this thread is running."""

    is_packed = False  # it has one packed row, and makes no mask


_running = _Running()


def register(stock: str) -> str:
    """Register the name under which a model whose attention is called `stock` trains packed."""
    name = _PREFIX + stock
    interface: Any = AttentionInterface
    masks: Any = AttentionMaskInterface
    interface.register(name, _attention_over(stock))
    if stock in masks():
        masks.register(name, _mask_over(stock))
    return name


def is_ours(name: str | None) -> bool:
    """Whether an attention's name is one that `register` has made."""
    return bool(name) and str(name).startswith(_PREFIX)


def stock_of(name: str | None) -> str | None:
    """The attention that a name stands for, without what `register` has made of it."""
    while is_ours(name):
        name = str(name).removeprefix(_PREFIX)
    return name


@contextmanager
def packed_forward() -> Iterator[None]:
    """While open, a model's forward pass gets one packed row."""
    enter_packed()
    try:
        yield
    finally:
        leave_packed()


def enter_packed() -> None:
    """From here on a model's forward pass gets one packed row."""
    _running.is_packed = True


def leave_packed() -> None:
    """From here on forward passes get padded batches."""
    _running.is_packed = False


@functools.cache  # compiled code is made for one function, not for its likes
def _attention_over(stock: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if kwargs.get("cu_seq_lens_q") is None:
            forward = stock_attention(stock, module)
            result: tuple[Tensor, Tensor | None]
            result = forward(module, query, key, value, attention_mask, **kwargs)
            return result
        return _packed_attention(module, query, key, value, **kwargs), None

    return attention


def stock_attention(stock: str, module: torch.nn.Module) -> Callable[..., Any]:
    """The attention that transformers calls `stock`, for this module of a model."""
    # "eager" is written out in each model's file; sharding derives classes elsewhere.
    files = (sys.modules[base.__module__] for base in type(module).__mro__)
    written = (getattr(file, "eager_attention_forward", None) for file in files)
    eager = next((forward for forward in written if forward is not None), None)
    interface: Any = AttentionInterface
    forward: Callable[..., Any] = interface().get_interface(stock, eager)
    return forward


def sees(module: torch.nn.Module, arguments: dict[str, Any]) -> tuple[bool, tuple[int, int] | None]:
    """Whether an attention is causal, and its window, from what it is called with."""
    causal = arguments.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    window = arguments.get("sliding_window")
    if window is None:
        return bool(causal), None
    return bool(causal), (window - 1, 0 if causal else window - 1)


def _packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
) -> Tensor:
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attention without padding has no {name}, which {type(module).__name__} needs: "
                "set padding_free=off"
            )
    causal, window = sees(module, kwargs)
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (
        tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in (query, key, value)
    )
    out = varlen_attention(
        query,
        key,
        value,
        kwargs["cu_seq_lens_q"],
        kwargs["max_length_q"],
        causal=causal,
        window=window,
        scale=kwargs.get("scaling"),
        dropout=kwargs.get("dropout") or 0.0,
    )
    return out.unsqueeze(0)


@functools.cache
def _mask_over(stock: str) -> Callable[..., Any]:
    interface: Any = AttentionMaskInterface
    masks = interface()

    def mask(*args: Any, **kwargs: Any) -> Any:
        if not _running.is_packed:
            return masks[stock](*args, **kwargs)
        # No attention but ours can do without a mask here, and this one fits none: whatever would
        # run another on a packed row fails.
        return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=kwargs.get("device"))

    return mask
