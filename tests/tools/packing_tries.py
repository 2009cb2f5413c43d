"""Tests of packed rows share this: float64 that stays, planted leaks, a helper in place."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepytorch.integrations.padding_free import packing_twin


def keep_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is float64 stay so where a model asks for float32."""
    real_to, real_float = Tensor.to, Tensor.float

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_wide = tensor.dtype == torch.float64
        if is_wide and (kwargs.get("dtype") == torch.float32 or torch.float32 in args):
            return tensor
        return real_to(tensor, *args, **kwargs)

    def as_float(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else real_float(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "float", as_float)


def without_a_boundary(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let the second sequence of a row see the first."""

    def leaking(*given: Any, **more: Any) -> Tensor:
        query, key, value, bounds, most = given
        joined = torch.cat([bounds[:1], bounds[2:]])
        return attention(query, key, value, joined, 2 * most, **more)

    return leaking


def with_a_trace_of_others(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Add a little of the row's mean to every token, which is lost in rounding to bfloat16."""

    def leaking(query: Tensor, key: Tensor, value: Tensor, *given: Any, **more: Any) -> Tensor:
        found = attention(query, key, value, *given, **more)
        return found + 0.03 * value.mean((0, 1))

    return leaking


class Inline:
    """Stands in for the helper's process."""

    answer: Any = None

    def __init__(self, environment: Any, *, is_awaited: bool) -> None: ...

    def ask(self, twin: bytes) -> None:
        """Try the twin out at once."""
        try:
            found = packing_twin.examine(pickle.loads(twin))
            self.answer = {"conventions": dataclasses.asdict(found)}
        except packing_twin.Unsupported as reason:
            self.answer = {"reason": str(reason)}

    def wait(self) -> None:
        """It is done."""

    def close(self) -> None:
        """There is nothing to end."""
