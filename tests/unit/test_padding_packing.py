"""Packing padded batches, their shapes, and the collator that never pads."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from deepytorch_core.data import PaddingFreeCollator, Shapes, plan
from deepytorch_core.data.shapes import Seen

DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16]


def ragged(lengths: list[int], width: int, *, left: bool = False) -> Tensor:
    """A mask [batch, width] with so many tokens in each row."""
    columns = torch.arange(width)
    columns = width - 1 - columns if left else columns
    return (columns[None, :] < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [False, True])
def test_padding_comes_back_where_it_was(dtype: torch.dtype, left: bool) -> None:
    lengths = [5, 0, 1, 7, 3]
    mask = ragged(lengths, 7, left=left)
    packing = plan(mask.to(dtype))
    assert packing.lengths == (5, 1, 7, 3)
    assert (packing.num_tokens, packing.longest, packing.is_full) == (16, 7, False)
    values = torch.randn(5, 7, 2, dtype=torch.float64, requires_grad=True)
    packed = packing.pack(values)
    assert packed.shape == (1, 16, 2)
    assert torch.equal(packed[0], values[mask.bool()])
    filled = torch.nn.functional.pad(packed, (0, 0, 0, 3), value=9.0)
    unpacked = packing.unpack(filled)
    assert torch.equal(unpacked, values * mask.unsqueeze(-1))
    (grad,) = torch.autograd.grad(unpacked.sum(), values)
    assert torch.equal(grad, mask.unsqueeze(-1).expand(5, 7, 2).double())
    assert torch.equal(packing.columns()[0], mask.nonzero()[:, 1])
    counted = mask.cumsum(1)[mask.bool()] - 1
    assert torch.equal(packing.ranks_in_row()[0], counted)


def test_a_padding_plan_travels() -> None:
    packing = plan(ragged([2, 3], 4), torch.zeros(2, 4).long() - 100)
    for other in (copy.deepcopy(packing), pickle.loads(pickle.dumps(packing)), packing.to("cpu")):
        assert torch.equal(other.indices, packing.indices)
        assert (other.lengths, other.shape, other.num_targets) == ((2, 3), (2, 4), 0)
    assert repr(packing) == "Packing(5 tokens of (2, 4))"


def targets(labels: Tensor, mask: Tensor) -> list[list[int]]:
    """Return what a loss that shifts compares each row's tokens with; -100 is nothing."""
    after = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return [row[kept.bool()].tolist() for row, kept in zip(after, mask, strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_without_padding_every_token_keeps_its_target(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (6,), generator=generator).tolist()
    mask = ragged(lengths, 8, left=bool(seed % 2))
    if seed > 5:  # padding between tokens
        mask &= torch.randint(0, 2, mask.shape, generator=generator)
    labels = torch.randint(0, 50, mask.shape, generator=generator)
    labels[mask == 0] = -100
    # Targets predicted from padding would be lost, so such batches are not packed.
    labels[:, 1:][mask[:, :-1] == 0] = -100
    packing = plan(mask, labels)
    assert packing.obstacle is None
    row = packing.pack_labels(labels, shifted=True)
    expected = [target for kept in targets(labels, mask) for target in kept]
    # The loss shifts the row as a whole: nothing may come from the next sequence.
    assert row[0, 1:].tolist() == expected[:-1]
    assert expected[-1] == row[0, 0] == -100
    unshifted = packing.pack_labels(labels, shifted=False)
    assert unshifted[0].tolist() == labels[mask.bool()].tolist()


def trained_on_padding() -> tuple[Tensor, Tensor]:
    mask = ragged([3, 4], 6)
    return mask, torch.ones_like(mask)


def predicted_from_padding() -> tuple[Tensor, Tensor]:
    mask = ragged([3, 4], 6, left=True)
    return mask, torch.where(mask == 1, 7, -100)


@pytest.mark.parametrize(
    ("mask", "labels", "said"),
    [
        (*trained_on_padding(), "labels train on padding"),
        (*predicted_from_padding(), "labels train on padding"),
        (torch.zeros(2, 3), None, "the batch has no tokens"),
        (torch.ones(2, 1, 3, 3), None, "attention_mask has 4 dimensions"),
        (torch.tensor([[0.0, -1e9]]), None, "attention_mask holds other values than 0 and 1"),
        (torch.tensor([[1.0, float("nan")]]), None, "attention_mask holds other values"),
        (torch.ones(2, 3), torch.zeros(2).long(), r"labels have the shape \(2,\)"),
    ],
)
def test_padding_stays_where_a_loss_depends_on_it(
    mask: Tensor, labels: Tensor | None, said: str
) -> None:
    obstacle = plan(mask, labels).obstacle
    assert obstacle is not None
    assert re.search(said, obstacle)


def test_padding_free_shapes_without_a_limit_are_the_batches_own() -> None:
    shapes = Shapes()
    assert shapes.fit(37, 3, 20) == (37, 3, 32)
    assert shapes.fit(64, 1, 64) == (64, 1, 64)
    assert shapes.fit(37, 3, 20) == (37, 3, 64)  # what was compiled for longer ones serves
    for wrong in ({"limit": 1, "max_length": 8}, {"limit": 4}, {"limit": 4, "max_length": 0}):
        with pytest.raises(ValueError, match="expected a limit of at least 2"):
            Shapes(**wrong)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("spread", [0.1, 0.9])
@pytest.mark.parametrize("limit", [2, 3, 4, 16])
def test_padding_free_shapes_are_few_and_hold_every_batch(
    rows: int, spread: float, limit: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    shapes, seen = Shapes(limit, max_length=512), set()
    tokens = filled = 0
    for step in range(200):
        exponents = torch.randn(rows, generator=generator) * spread + 5
        lengths = exponents.exp().long().clamp(1, 512).tolist()
        # An epoch's last batch has fewer rows.
        lengths = lengths[: rows - 1] or lengths if step == 99 else lengths
        shape = shapes.fit(sum(lengths), len(lengths), max(lengths))
        seen.add(shape)
        assert shape.num_tokens >= sum(lengths)
        filling = -(-(shape.num_tokens - sum(lengths)) // shape.max_length)
        assert shape.num_sequences >= len(lengths) + filling
        assert shape.max_length == 512
        tokens += sum(lengths)
        filled += shape.num_tokens
    assert len(seen) <= limit + 4  # few batches are beyond those of the first ones
    assert filled <= 200 * 512 * rows
    if limit == 16 and rows == 8:  # once the first twelve, of the largest size, have been
        assert filled - 12 * 512 * rows < 1.15 * tokens
    larger = shapes.fit(5000 * rows, rows, 5000)
    assert larger.num_tokens >= 5000 * rows


def test_a_plan_of_a_batch_moves_as_tensors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = plan(torch.tensor([[1, 1, 0], [1, 0, 0]]), None)
    assert torch.equal(packing.to("cpu").cpu().indices, packing.indices)
    assert packing.cpu().lengths == packing.lengths
    asked = []
    monkeypatch.setattr(
        Tensor, "cuda", lambda self, device, **how: asked.append((device, how)) or self
    )
    assert packing.cuda(1, non_blocking=True).shape == packing.shape
    assert asked == [(1, {"non_blocking": True})]


def test_padding_free_shapes_become_few_when_asked() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(10, 200, (60, 4), generator=generator).tolist()
    shapes = Shapes()
    for lengths in batches[:20]:
        assert shapes.fit(sum(lengths), 4, max(lengths)).num_tokens == sum(lengths)
    shapes.use_few(5)
    seen = {shapes.fit(sum(lengths), 4, max(lengths)) for lengths in batches[:20]}
    assert 1 < len(seen) <= 6
    seen |= {shapes.fit(sum(lengths), 4, max(lengths)) for lengths in batches}
    assert len(seen) <= 8, "and a few for what is unlike all before"
    shapes.use_few(None)
    assert shapes.fit(37, 3, 20).num_tokens == 37
    assert not shapes.are_few


def test_padding_free_shapes_go_on_where_batches_grow() -> None:
    """Batches of several micro-batches are filled no more than those before."""
    generator = torch.Generator().manual_seed(2)
    shapes = Shapes()
    shapes.use_few(16)
    for tokens in torch.randint(1_000, 2_700, (40,), generator=generator).tolist():
        shapes.fit(tokens, 8, 1_000)
    larger = torch.randint(6_000, 8_000, (40,), generator=generator).tolist()
    found = [shapes.fit(tokens, 32, 1_000).num_tokens for tokens in larger]
    assert sum(found) < 1.1 * sum(larger)
    assert len(set(found)) < 8


def test_padding_free_shapes_that_are_few_from_now_on_are_chosen_after_twelve_batches() -> None:
    shapes = Shapes()
    shapes.use_few(3)
    found = [shapes.fit(100 + step, 4, 60) for step in range(13)]
    assert [shape.num_tokens for shape in found[:11]] == [100 + step for step in range(11)]
    assert found[12].num_tokens % 64 == 0
    assert shapes.are_few


def totals(number: int, least: int, most: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, most, (number,), generator=generator).tolist()


def fitted(shapes: Shapes, batches: list[int]) -> list[Any]:
    return [shapes.fit(tokens, 1 + tokens % 8, 200 + tokens % 90) for tokens in batches]


def test_padding_free_shapes_of_another_run_are_those_of_the_first() -> None:
    told: list[Seen] = []
    shapes = Shapes()
    shapes.resume(None, told.append)
    shapes.use_few(12)
    fitted(shapes, totals(40, 1_000, 2_000, seed=0))
    (seen,) = told
    later = totals(60, 1_000, 2_000, seed=1)
    expected = fitted(shapes, later)
    again = Shapes()
    again.resume(seen, told.append)
    fitted(again, later[:5])
    again.use_few(12)
    assert fitted(again, later) == expected
    assert again.are_few
    assert told == [seen], "the next run goes by the same"


@pytest.mark.parametrize(("least", "most"), [(100, 200), (6_000, 9_000)])
def test_padding_free_shapes_of_another_run_are_forgotten_where_batches_are_others(
    least: int, most: int
) -> None:
    told: list[Seen] = []
    shapes, fresh = Shapes(), Shapes()
    shapes.resume(Seen(tuple(totals(12, 1_000, 2_000, seed=0)), 8, 290, 0), told.append)
    for each in (shapes, fresh):
        each.use_few(12)
    batches = totals(40, least, most, seed=1)
    assert fitted(shapes, batches) == fitted(fresh, batches)
    assert [seen.num_tokens for seen in told] == [tuple(batches[:12])]


def examples() -> list[dict[str, Any]]:
    return [
        {"input_ids": [5, 6, 7], "labels": [5, -100, 7]},
        {"input_ids": [8], "labels": [8]},
        {"input_ids": [9, 10], "labels": [9, 10]},
    ]


@pytest.mark.parametrize(
    "keywords",
    [
        {"return_flash_attn_kwargs": True},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True, "position_ids_start": 2},
        {"return_flash_attn_kwargs": False, "return_position_ids": False, "separator_id": -7},
    ],
)
@pytest.mark.parametrize("labelled", [True, False])
def test_the_padding_free_collator_gives_what_transformers_does(
    keywords: dict[str, Any], labelled: bool
) -> None:
    features = examples()
    if not labelled:
        features = [{"input_ids": example["input_ids"]} for example in features]
    theirs = DataCollatorWithFlattening(**keywords)(copy.deepcopy(features))
    ours = PaddingFreeCollator(**keywords)(features)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            assert torch.equal(ours[name], value), name
            assert ours[name].dtype == value.dtype, name
        else:
            assert ours[name] == value, name


def test_the_padding_free_collator_drops_padding_and_empty_examples() -> None:
    features = [
        {"input_ids": [0, 3, 4], "attention_mask": [0, 1, 1], "token_type_ids": [0, 0, 1]},
        {"input_ids": [], "attention_mask": [], "token_type_ids": []},
        {
            "input_ids": torch.tensor([6, 0]),
            "attention_mask": [True, False],
            "token_type_ids": [1, 0],
        },
    ]
    batch = PaddingFreeCollator()(features)
    assert batch["input_ids"].tolist() == [[3, 4, 6]]
    assert batch["labels"].tolist() == [[-100, 4, -100]]
    assert batch["token_type_ids"].tolist() == [[0, 1, 1]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        ({"input_ids": [1, 2], "position_ids": [0, 1]}, "example 0 has position_ids, so it is pac"),
        ({"input_ids": [[1, 2]]}, r"input_ids of example 0 have the shape \(1, 2\)"),
        ({"input_ids": [1, 2], "labels": [1]}, "example 0 has 2 input_ids and 1 labels"),
        ({"input_ids": [1] * 9}, "example 0 has 9 tokens, more than max_length=8: truncate it"),
        ({"input_ids": []}, "a batch has no tokens"),
    ],
)
def test_the_padding_free_collator_says_what_is_wrong(feature: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PaddingFreeCollator(max_length=8)([feature])
    with pytest.raises(ValueError, match="return_tensors='np'"):
        PaddingFreeCollator(return_tensors="np")


def test_a_part_of_a_plan_is_no_plan_and_nobody_goes_through_it() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    part = plan(mask)[:1]
    assert part.obstacle is not None
    assert part.shape != (1, 3)
    with pytest.raises(TypeError, match="not iterable"):
        iter(plan(mask))
