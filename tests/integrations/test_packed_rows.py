"""Rows that somebody else has packed train as stock's, without a mask of their size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AttentionMaskInterface,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deepytorch.integrations.common.hook import Hook
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import packed_rows
from deepytorch.integrations.transformers import pack_batches
from deepytorch_core.base import decisions
from deepytorch_core.compile import capture

LENGTHS = (5, 1, 9, 3)


def llama(**more: Any) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, **more))


def qwen3() -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67}
    return Qwen3ForCausalLM(Qwen3Config(**shape, **heads))


def row(seed: int, lengths: Sequence[int] = LENGTHS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 67, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": ids.where(positions != 0, -100),
    }


def trained(model: Any, **more: Any) -> tuple[list[float], list[torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed in range(4):
        output = model.train()(**row(seed), **more)
        output.loss.backward()
        losses += [output.loss.item(), output.logits.detach().mean().item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, list(model.parameters())


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The masks that stock has made."""
    made: list[int] = []
    known = AttentionMaskInterface._global_mapping
    stock = known["sdpa"]

    def mask(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return stock(*args, **kwargs)

    monkeypatch.setitem(known, "sdpa", mask)
    return made


@pytest.mark.parametrize("make", [llama, qwen3])
def test_a_row_with_positions_that_begin_anew_needs_no_mask(make: Any, masks: list[int]) -> None:
    torch.manual_seed(0)
    model = make().double()
    expected = trained(copy.deepcopy(model), use_cache=False)
    assert pack_batches(model)
    masks.clear()
    found = trained(model, use_cache=False)
    assert masks == []
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_sequences_that_see_each_other_in_stock_are_told_and_left_so(masks: list[int]) -> None:
    torch.manual_seed(0)
    model = llama().double()
    apart = trained(copy.deepcopy(model), use_cache=False)
    expected = trained(copy.deepcopy(model), use_cache=True)
    assert apart[0] != pytest.approx(expected[0], rel=1e-6)
    assert pack_batches(model)
    found = trained(model, use_cache=True)
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    assert any("see each other" in decision["reason"] for decision in decisions.made())


def test_a_model_that_does_not_go_by_positions_is_left_alone() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = BertConfig(**shape, num_attention_heads=4, vocab_size=67, max_position_embeddings=99)
    model: Any = BertForMaskedLM(config).double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    stock = copy.deepcopy(model)
    expected = trained(stock)
    assert pack_batches(model)
    conventions = padding_free.conventions(model)
    assert conventions is not None
    assert not conventions.by_position
    assert trained(model)[0] == pytest.approx(expected[0], rel=1e-9)


def test_one_sequence_and_padded_batches_have_no_bounds() -> None:
    sequence = {
        "input_ids": torch.ones(1, 6, dtype=torch.int64),
        "position_ids": torch.arange(6)[None],
    }
    assert packed_rows.by_position(sequence) == {}
    masked = {**row(0), "attention_mask": torch.ones(1, sum(LENGTHS))}
    assert packed_rows.by_position(masked) == {}
    found = packed_rows.by_position(row(0))
    assert found["cu_seq_lens_q"].tolist() == [0, 5, 6, 15, 18]
    assert found["max_length_q"] == 9


ROWS = [(5, 1, 9, 3), (7, 8), (18,), (4, 4, 4, 2, 3), (2, 1, 1, 9, 3, 2), (9, 9)] * 4
Row = dict[str, torch.Tensor]


def with_bounds(row: Row) -> Row:
    """The row as TRL gives it, with what flash attention and layers with a state go by."""
    starts = (row["position_ids"][0] == 0).nonzero().flatten()
    ends = torch.cat([starts, torch.tensor([row["position_ids"].numel()])]).to(torch.int32)
    longest = int(ends.diff().max())
    numbers = torch.repeat_interleave(torch.arange(len(starts)), ends.diff())[None]
    more: Any = {"max_length_q": longest, "max_length_k": longest, "seq_idx": numbers.int()}
    return row | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends} | more


def gradients(model: Any, make: Callable[[Row], Row]) -> Iterator[tuple[float, Any, Any]]:
    for seed, lengths in enumerate(ROWS):
        output = model.train()(**make(row(seed, lengths)), use_cache=False)
        found = torch.autograd.grad(output.loss, list(model.parameters()))
        yield output.loss.item(), found, output.logits.detach()


@pytest.mark.parametrize("make", [dict, with_bounds])
def test_rows_have_few_shapes_where_passes_are_replayed(make: Any, masks: list[int]) -> None:
    torch.manual_seed(0)
    model = llama().double()
    stock = copy.deepcopy(model)
    assert pack_batches(model)
    shapes = []

    def look(_: Any, __: Any, given: dict[str, Any]) -> None:
        ends = given["cu_seq_lens_q"]
        longest = given["max_length_q"]
        shapes.append((*given["position_ids"].shape, *ends.shape, longest))
        assert int(ends[-1]) == given["position_ids"].shape[1]
        assert int(ends.diff().max()) <= longest
        if (numbers := given.get("seq_idx")) is not None:
            assert numbers.shape == given["position_ids"].shape
            assert len(set(numbers[0].tolist())) <= len(ends)

    model.model.register_forward_pre_hook(Hook(look), with_kwargs=True)
    capture.use_few_sizes(model, True, by="test")
    masks.clear()
    mine = list(gradients(model, make))
    assert masks == []
    sizes = capture.sizes_of(model)
    assert sizes is not None
    assert sizes.are_few
    assert len(set(shapes[12:])) <= 3
    for (loss, found, logits), (its_loss, expected, its_logits) in zip(
        mine, gradients(stock, dict), strict=True
    ):
        assert loss == pytest.approx(its_loss, rel=1e-6)
        torch.testing.assert_close(logits, its_logits, rtol=1e-6, atol=1e-8)
        for one, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(one, theirs, rtol=1e-6, atol=1e-9)


def test_rows_that_see_each_other_in_stock_stay_so_where_passes_are_replayed() -> None:
    torch.manual_seed(0)
    model = llama().double()
    expected = trained(copy.deepcopy(model), use_cache=True)
    assert pack_batches(model)
    capture.use_few_sizes(model, True, by="test")
    assert trained(model, use_cache=True)[0] == pytest.approx(expected[0], rel=1e-9)


def test_a_row_with_more_than_can_be_filled_has_not_one_of_few_shapes() -> None:
    torch.manual_seed(0)
    model = llama().double()
    assert pack_batches(model)
    capture.use_few_sizes(model, True, by="test")
    sizes = capture.sizes_of(model)
    assert sizes is not None
    given = with_bounds(row(0))
    model.train()(**given, use_cache=False, spans=given["position_ids"])
    assert not sizes.are_few
