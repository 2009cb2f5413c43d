"""Tests of fixes for mixtures of experts: the same losses and gradients, and nobody waits."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepytorch_core import nn as own_nn
from deepytorch_core.compile import fixes
from deepytorch_core.compile.fixes import expert_counts, grouped_products
from deepytorch_core.nn.grouped_mm import grouped_mm

transformers = pytest.importorskip("transformers")

KERNELS = "deepytorch_core.nn.grouped_mm_kernels"


def groups(ends: Tensor) -> Iterator[slice]:
    yield from itertools.starmap(slice, itertools.pairwise([0, *ends.tolist()]))


def by_rows(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    out = left.new_zeros((len(left), right.shape[2]))
    for matrix, rows in zip(right, groups(ends), strict=True):
        out[rows] = left[rows] @ matrix
    return out


def by_groups(left: Tensor, right: Tensor, ends: Tensor, *, is_transposed: bool = False) -> Tensor:
    out = torch.stack([left[rows].T @ right[rows] for rows in groups(ends)])
    return out.mT.contiguous().mT if is_transposed else out


@pytest.fixture
def num_products(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Loops in place of the kernels, on the CPU, where all products wait; returns their number."""
    count = itertools.count()

    def counted(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        next(count)
        return by_rows(left, right, ends)

    kernels = types.SimpleNamespace(by_rows=counted, by_groups=by_groups)
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    monkeypatch.setattr(own_nn, "grouped_mm_kernels", kernels, raising=False)
    monkeypatch.setattr(grouped_products, "waits", lambda weight: True)
    monkeypatch.setattr(grouped_products, "_has_triton", lambda: True)
    return lambda: next(count)


# Empty groups at the beginning, in the middle and at the end, and rows behind the last one.
@pytest.mark.parametrize("ends", [[2, 5, 9], [0, 4, 9], [3, 3, 9], [9, 9, 9], [1, 2, 7]])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_gradients_of_grouped_products(
    ends: list[int], is_transposed: bool, num_products: Callable[[], int]
) -> None:
    torch.manual_seed(0)
    left = torch.randn((9, 3), dtype=torch.float64, requires_grad=True)
    shape = (3, 4, 3) if is_transposed else (3, 3, 4)
    right = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    at = torch.tensor(ends, dtype=torch.int32)

    def product(left: Tensor, right: Tensor) -> Tensor:
        return grouped_mm(left, right.mT if is_transposed else right, at)

    assert torch.autograd.gradcheck(product, (left, right))
    assert torch.autograd.gradgradcheck(product, (left, right))
    found = product(left, right)
    assert not found[ends[-1] :].any()
    (gradient,) = torch.autograd.grad(found.sum(), right)
    assert gradient.stride() == right.stride()


def tiny_moe(family: str, **own: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts_per_tok=2,
        output_router_logits=True,
        **own,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.set_experts_implementation("grouped_mm")
    return model.train()


FAMILIES = {
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_mixture_of_experts_trains_the_same(
    family: str, is_masked: bool, num_products: Callable[[], int]
) -> None:
    model = tiny_moe(family, **FAMILIES[family])
    stock = copy.deepcopy(model)
    forward = fixes.applied(model, model.forward)
    for number in range(3):
        ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(number))
        batch = {"input_ids": ids, "labels": ids}
        if is_masked:
            batch["attention_mask"] = (torch.arange(9) < torch.tensor([[9], [5]])).long()
        found, expected = forward(**batch), stock(**batch)
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.aux_loss, expected.aux_loss)
        found.loss.backward()
        expected.loss.backward()
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    # Two products a layer and pass, and as many of the same kind backward.
    assert num_products() == 3 * 2 * 2 * 2


@pytest.mark.parametrize("is_captured", [True, False])
def test_compiled_experts_do_not_wait_while_captured(
    is_captured: bool, num_products: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import moe

    monkeypatch.setattr(grouped_products, "is_captured", lambda: is_captured)
    experts = tiny_moe("Qwen3Moe", **FAMILIES["Qwen3Moe"]).model.layers[0].mlp.experts
    compiled = torch.compile(copy.deepcopy(experts), backend="aot_eager", fullgraph=True)
    states = torch.randn((9, 16), requires_grad=True)
    chosen = torch.rand((9, 4)).topk(2)
    seed = torch.randn((9, 16))

    def gradients(run: Any, module: Any) -> list[Tensor]:
        product = run(states, chosen.indices, chosen.values)
        return [product, *torch.autograd.grad(product, [states, *module.parameters()], seed)]

    expected = gradients(experts, experts)
    assert num_products() == 0
    with grouped_products.compiled_without_look(moe, "CPU"):
        found = gradients(compiled, compiled)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    # Two products forward and two of the same kind backward, with the question above.
    assert num_products() == (5 if is_captured else 1)
    again = gradients(compiled, compiled)
    torch.testing.assert_close(again[0], expected[0])
    assert num_products() == (6 if is_captured else 2)


def test_other_products_and_threads_get_torchs_own(num_products: Callable[[], int]) -> None:
    left, right = torch.randn((8, 4)), torch.randn((2, 4, 8))
    ends = torch.tensor([3, 8], dtype=torch.int32)
    stock = torch._grouped_mm
    expected = stock(left, right, offs=ends)
    found: list[Tensor] = []
    with grouped_products.without_look():
        found.append(torch._grouped_mm(right, right.mT))  # one matrix each: no groups
        found.append(torch._grouped_mm(left.mT, left, offs=ends))

        def other() -> None:
            found.append(torch._grouped_mm(left, right, offs=ends))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert num_products() == 0
        torch.testing.assert_close(torch.nn.functional.grouped_mm(left, right, offs=ends), expected)
    torch.testing.assert_close(found[0], right @ right.mT)
    torch.testing.assert_close(found[1], by_groups(left, left, ends))
    torch.testing.assert_close(found[2], expected)
    assert torch._grouped_mm is stock
    assert num_products() == 2  # with the question above


def test_only_models_whose_products_wait_are_changed() -> None:
    model = tiny_moe("Qwen3Moe", **FAMILIES["Qwen3Moe"])
    fix = grouped_products.GroupedProducts()
    assert fix.around(model) is None  # on the CPU
    assert isinstance(fix.during(model), contextlib.nullcontext)
    assert expert_counts.ExpertCounts().around(nn.Linear(2, 2)) is None
    assert expert_counts.ExpertCounts().around(model.model.layers[0]) is None


def load_balancing_loss_func(scores: Tensor, numbers: Tensor, least: int) -> Tensor:
    """As transformers' goes about it."""
    routing_weights = torch.softmax(scores, -1)
    return torch.bincount(numbers % routing_weights.shape[-1], minlength=least)


def elsewhere(scores: Tensor, numbers: Tensor, least: int) -> Tensor:
    routing_weights = torch.softmax(scores, -1)
    return torch.bincount(numbers % routing_weights.shape[-1], minlength=least)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("least", [0, 3, 6, 9])
def test_experts_are_counted_without_a_look(
    dtype: torch.dtype, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = torch.randint(0, 6, (40,), dtype=torch.int64).to(dtype)
    scores = torch.randn((40, 6))
    expected = torch.bincount(numbers, minlength=least)
    stock, calls = torch.bincount, []
    monkeypatch.setattr(torch, "bincount", lambda *args: (calls.append(args), stock(*args))[1])
    with expert_counts.without_look():
        found = load_balancing_loss_func(scores, numbers, least)
        assert len(calls) == (least < 6)  # there may be more than it was told: stock's
        other = elsewhere(scores, numbers, least)
        assert len(calls) == (least < 6) + 1
    for output in (found, other):
        assert output.dtype == expected.dtype
        assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("numbers", [[0, 6], [-1, 2]])
def test_a_number_that_is_no_expert_is_an_error(numbers: list[int]) -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        expert_counts.counted(torch.tensor(numbers), 6)
