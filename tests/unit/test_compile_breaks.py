"""Tests of how places in a program are named."""

from __future__ import annotations

import pytest
import torch

from deepytorch_core.guard import breaks


class Router:
    def chosen(self, indices: object) -> torch.Tensor:
        return torch.nn.functional.embedding(indices, torch.ones((2, 2)))  # type: ignore[arg-type]


def test_the_function_outside_of_torch_is_named() -> None:
    with pytest.raises(TypeError) as raised:
        Router().chosen("no tensor")
    first = Router.chosen.__code__.co_firstlineno
    assert breaks.function(raised.value) == f"Router.chosen ({__file__}:{first + 1})"
    assert breaks.function(TypeError("raised by nobody")) == "?"
