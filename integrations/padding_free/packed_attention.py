"""transformers' attention interface, taught attention without padding.

Configurations keep the names that they have. While a model is attached, transformers finds ours
under an attention's name, with the named one behind it. A call that brings `PACKED` goes to
`deepytorch_core.data.varlen_attention`. Any other call goes to the named one, with its own mask. So
a model stays right whatever it is given, also in the recomputation of activation checkpoints, which
happens long after the forward pass.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from deepytorch_core.data import varlen_attention
from deepytorch_core.data.varlen_attention import lacking

PACKED = "deepytorch_packed"
"""The argument of a forward pass whose attention is ours; models hand it on as they do others."""

# Attentions also take these, by the argument's name; packed ones here can't do them.
_REFUSED = ("softcap", "position_bias", "head_mask", "cache")

_Attention = Callable[..., Any]
# Older versions have models ask for their eager attention nowhere: those keep their padding.
_LOOKUP = "get_interface" if hasattr(AttentionInterface, "get_interface") else "__getitem__"
_stock_attention_of: Any = getattr(AttentionInterface, _LOOKUP)
_stock_mask_of: Any = AttentionMaskInterface.__getitem__


class _Running(threading.local):
    """The known facts of the forward pass that this thread is running."""

    is_packed = False  # it has one packed row, and makes no mask
    lacking: str | None = None  # why its attention had no kernel


_running = _Running()


class _Lookups:
    """The lookups of transformers, replaced while anybody needs it.

    Attributes:
        tried: in place of every attention, for who finds out what models ask of theirs.
        made: in place of every mask, for the same.
    """

    def __init__(self) -> None:
        self.tried: _Attention | None = None
        self.made: Callable[..., Any] | None = None
        self._num_users = 0
        self._lock = threading.Lock()

    def open(self) -> Callable[[], None]:
        """Replace them; returns what puts stock's back once the last user has called it."""
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                setattr(AttentionInterface, _LOOKUP, _attention_of)
                setattr(AttentionMaskInterface, "__getitem__", _mask_of)  # noqa: B010
        is_open = True

        def close() -> None:
            nonlocal is_open
            with self._lock:
                self._num_users -= is_open
                if is_open and not self._num_users:
                    _put_back(AttentionInterface, _LOOKUP, _stock_attention_of)
                    _put_back(AttentionMaskInterface, "__getitem__", _stock_mask_of)
                is_open = False

        return close


def _put_back(owner: type, name: str, stock: Any) -> None:
    delattr(owner, name)
    if getattr(owner, name, None) is not stock:  # not inherited
        setattr(owner, name, stock)


_lookups = _Lookups()


def use_packed() -> Callable[[], None]:
    """Have attentions that get `PACKED` be ours; returns what ends that."""
    return _lookups.open()


@contextmanager
def trying(attention: _Attention, mask: Callable[..., Any]) -> Iterator[None]:
    """While open, models call these in place of every attention and every mask.

    Args:
        attention: gets the attention that was looked up before its arguments.
        mask: gets the arguments of a mask.
    """
    close = _lookups.open()
    _lookups.tried, _lookups.made = attention, mask
    try:
        yield
    finally:
        _lookups.tried = _lookups.made = None
        close()


def stock_attention(name: str) -> _Attention:
    """The attention that transformers has under a name; not eager, which each model writes out."""
    interface: Any = AttentionInterface
    arguments = (name, None) if _LOOKUP == "get_interface" else (name,)
    found: _Attention = _stock_attention_of(interface(), *arguments)
    return found


def stock_mask(name: str) -> Callable[..., Any]:
    """The function that makes masks for the attention of that name."""
    interface: Any = AttentionMaskInterface
    found: Callable[..., Any] = _stock_mask_of(interface(), name)
    return found


@contextmanager
def packed_forward() -> Iterator[None]:
    """While open, a model's forward pass gets one packed row.

    Raises NotImplementedError where its attention had no kernel.
    """
    close = _lookups.open()
    enter_packed()
    try:
        yield
    finally:
        why = leave_packed()
        close()
    if why is not None:
        raise NotImplementedError(why)


def enter_packed() -> None:
    """From here on a model's forward pass gets one packed row."""
    _running.is_packed = True


def leave_packed() -> str | None:
    """From here on forward passes get padded batches.

    Returns why the device had no kernel for attention of the pass that ends, if it had none.
    """
    _running.is_packed = False
    why, _running.lacking = _running.lacking, None
    return why


def _attention_of(interface: Any, *args: Any) -> _Attention:
    # A partial object, which compilers see through.
    return functools.partial(_either, _stock_attention_of(interface, *args))


def _either(
    stock: _Attention,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _lookups.tried is not None:
        return _lookups.tried(stock, module, query, key, value, *args, **kwargs)
    if kwargs.pop(PACKED, None) is None:
        return stock(module, query, key, value, *args, **kwargs)
    return _packed_attention(module, query, key, value, **kwargs), None


def _mask_of(interface: Any, name: str) -> Any:
    stock = _stock_mask_of(interface, name)
    if _lookups.made is not None:
        return _lookups.made
    return _no_mask if _running.is_packed else stock


def _no_mask(*args: Any, **kwargs: Any) -> Tensor:
    # No attention but ours can do without a mask here, and this one fits none: whatever would
    # run another on a packed row fails.
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=kwargs.get("device"))


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
    dropout, sinks = kwargs.get("dropout") or 0.0, kwargs.get("s_aux")
    why = lacking(query, causal=causal, window=window, dropout=dropout, sinks=sinks)
    if why is not None:
        _running.lacking = why
    out = varlen_attention(
        query,
        key,
        value,
        kwargs["cu_seq_lens_q"],
        kwargs["max_length_q"],
        causal=causal,
        window=window,
        scale=kwargs.get("scaling"),
        dropout=dropout,
        sinks=sinks,
    )
    return out.unsqueeze(0)
