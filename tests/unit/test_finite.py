"""Numbers that are none are found in tensors of every kind, and counted."""

from __future__ import annotations

import math

import pytest
import torch

from deepytorch_core.base.config import Options
from deepytorch_core.base.finite import fault_of

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_and_their_number_are_told(dtype: torch.dtype, value: float) -> None:
    tensor = torch.zeros(3, 7, dtype=dtype)
    assert fault_of(tensor) == ""
    tensor[1, 2] = tensor[2, 6] = value
    text = fault_of(tensor)
    assert text.startswith("2 of 21 numbers that are none, the first at 9 (")
    assert str(dtype).removeprefix("torch.") in text


def test_float8_and_sparse_tensors() -> None:
    tiny = torch.tensor([1.0, math.nan]).to(torch.float8_e5m2)
    assert "1 of 2" in fault_of(tiny)
    sparse = torch.sparse_coo_tensor([[1, 4]], [1.0, math.nan], (9,), check_invariants=True)
    assert "1 of 2" in fault_of(sparse)


@pytest.mark.parametrize("tensor", [torch.ones(3, dtype=torch.int64), torch.empty(0)])
def test_nothing_is_wrong_with_integers_and_nothing(tensor: torch.Tensor) -> None:
    assert fault_of(tensor) == ""


def test_the_option_means_on_and_more() -> None:
    assert Options(debug="nan").debug == "nan"
    assert Options(debug="on").debug is True
    assert Options(debug="off").debug is False
    with pytest.raises(ValueError, match=r"debug='nam'.*or nan \(did you mean nan\?\)"):
        Options(debug="nam")
