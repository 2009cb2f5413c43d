"""The helpers of tests of collectives find what is wrong, and only that."""

from __future__ import annotations

import pytest
import torch

from deepytorch_core.testing.tensors import assert_close, rank_inputs, reduced, shifted

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_a_reduction_is_close_and_a_wrong_element_is_not(dtype: torch.dtype, op: str) -> None:
    inputs = rank_inputs(101, 3, dtype, CPU)
    exact = reduced(inputs, op)
    assert exact.dtype == torch.float64
    assert_close(exact.to(dtype), exact, "as computed")
    wrong = exact.to(dtype, copy=True)
    wrong[100] += 0.5
    with pytest.raises(AssertionError, match=r"last one: off by 0\.[45]"):
        assert_close(wrong, exact, "last one")


def test_inputs_are_every_ranks_own_and_the_same_everywhere() -> None:
    inputs = rank_inputs(17, 2, torch.float32, CPU)
    again = rank_inputs(17, 2, torch.float32, CPU)
    assert not torch.equal(inputs[0], inputs[1])
    assert all(torch.equal(tensor, other) for tensor, other in zip(inputs, again, strict=True))


@pytest.mark.parametrize("elements", [0, 1, 3])
def test_a_shifted_tensor_holds_the_same(elements: int) -> None:
    value = torch.arange(12.0).reshape(3, 4)
    view = shifted(value, elements)
    assert torch.equal(view, value.flatten())
    assert view.data_ptr() % 16 == 4 * elements % 16
