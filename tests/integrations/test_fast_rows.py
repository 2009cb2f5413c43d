"""Tensors of rows of token ids: the very ones that transformers makes, or its errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import tokenization_utils_base as tokenizers
from transformers.data import data_collator

from deepytorch.integrations.seams import fast_rows
from deepytorch_core.base.patching import Patches, original_of

WIDTH = 80


@pytest.fixture(autouse=True)
def _in_place() -> Iterator[None]:
    patches = Patches()
    fast_rows.of_tokenizers(tokenizers, patches)
    fast_rows.of_collates(data_collator, patches)
    yield
    patches.undo()


def rows(seed: int, *, least: int = WIDTH) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(5, 90) for _ in range(draw.randrange(least, WIDTH + 1))] for _ in "abcde"
    ]


VALUES: dict[str, Any] = {
    "rows": rows(0),
    "few": [[1, 2], [3, 4]],
    "ragged": rows(1, least=3),
    "empty rows": [[]] * 5,
    "empty": [],
    "flat": list(range(500)),
    "fractions": [[0.5] * WIDTH] * 5,
    "mixed": [[1, *[0.5] * (WIDTH - 1)]] * 5,
    "truths": [[True] * WIDTH] * 5,
    "mixed truths": [[1, *[True] * (WIDTH - 1)]] * 5,
    "large": [[2**40] * WIDTH] * 5,
    "too large": [[2**63] * WIDTH] * 5,
    "nothing": [[1, *[None] * (WIDTH - 1)]] * 5,
    "words": [["a"] * WIDTH] * 5,
    "tuples": [(1,) * WIDTH] * 5,
    "deep": [[[1, 2]] * WIDTH] * 5,
    "arrays": [np.arange(WIDTH)] * 5,
    "tensors": [torch.arange(WIDTH)] * 5,
    "a tensor": torch.ones(5, WIDTH),
}


def outcome(run: Any) -> Any:
    """Values, dtypes and shapes by name in their order; or the error."""
    try:
        found = dict(run())
    except Exception as error:
        return type(error), str(error)
    return [
        (
            name,
            str(value.dtype),
            tuple(value.shape),
            value.tolist(),
            value.untyped_storage().resizable(),
        )
        if isinstance(value, Tensor)
        else (name, type(value), str(value))
        for name, value in found.items()
    ]


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("how", [{}, {"prepend_batch_axis": True}, {"tensor_type": "np"}])
def test_a_tokenizers_batch_becomes_the_same_tensors(kind: str, how: dict[str, Any]) -> None:
    how = {"tensor_type": "pt", **how}
    given = {"input_ids": rows(2), "other": VALUES[kind], "attention_mask": rows(3)}
    stock = original_of(tokenizers.BatchEncoding.convert_to_tensors)
    found = outcome(lambda: tokenizers.BatchEncoding(dict(given)).convert_to_tensors(**how))
    assert found == outcome(lambda: stock(tokenizers.BatchEncoding(dict(given)), **how))


@pytest.mark.parametrize("kind", VALUES)
def test_collated_features_become_the_same_tensors(kind: str) -> None:
    others = VALUES[kind]
    features = [
        {"input_ids": ids, "label_ids": ids[:3], "other": other, "number": number}
        for number, (ids, other) in enumerate(zip(rows(4), others, strict=False))
    ] or [{"label": 1, "input_ids": [1] * 300}]
    before = [dict(feature) for feature in features]
    stock = original_of(data_collator.torch_default_data_collator)
    found = outcome(lambda: hf.default_data_collator(features))
    assert found == outcome(lambda: stock(features))
    assert [list(feature) for feature in features] == [list(feature) for feature in before]
    assert all(type(feature["input_ids"]) is list for feature in features)


def test_numbers_are_not_looked_at_one_by_one(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "words.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    tokenizer = hf.BertTokenizerFast(vocab=str(tmp_path / "words.txt"))
    monkeypatch.setattr(tokenizers, "flatten", None)  # which would go through them
    found = tokenizer.pad([{"input_ids": ids} for ids in rows(5, least=60)], return_tensors="pt")
    assert found["input_ids"].shape[0] == 5


def test_stock_converts_what_is_switched_off(monkeypatch: Any) -> None:
    from deepytorch_core.base import config

    monkeypatch.setattr(config, "_current", config.Options(compile="off"))
    monkeypatch.setattr(fast_rows, "_array", None)
    found = tokenizers.BatchEncoding({"input_ids": rows(6)}).convert_to_tensors("pt")
    assert found["input_ids"].tolist() == rows(6)
    assert hf.default_data_collator([{"input_ids": [1] * 300}])["input_ids"].shape == (1, 300)
