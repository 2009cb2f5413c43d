"""Batches that are loaded before they are asked for: the same, with the same random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset
from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

from deepytorch.integrations.common import contract
from deepytorch.integrations.seams import early_batches
from deepytorch_core.base import beside

NUM_ROWS = 23


@pytest.fixture
def early() -> Iterator[None]:
    changes = contract.Changes()
    early_batches.install(changes)
    yield
    changes.undo()


def rows() -> TensorDataset:
    return TensorDataset(torch.arange(NUM_ROWS), torch.randn(NUM_ROWS, 3))


def masked_rows(folder: Any) -> DataLoader[Any]:
    file = folder / "words.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(90))]
    file.write_text("\n".join(words))
    tokenizer = BertTokenizerFast(vocab=str(file))
    ids = [[5 + (3 * row + place) % 90 for place in range(7)] for row in range(NUM_ROWS)]
    data = Dataset.from_dict({"input_ids": ids})
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4)
    return DataLoader(data, batch_size=4, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]


def seen(loader: Any, *, draws: bool) -> list[Any]:
    """All batches of three epochs, and numbers drawn between them and after each."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    found: list[Any] = []
    for _ in range(3):
        for batch in loader:
            beside.launched()
            found.append(batch)
            if draws:
                found += [torch.rand(2), random.random(), np.random.rand()]
        found += [torch.rand(2), random.random(), np.random.rand()]
    return found


def same(ours: Any, other: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, other)
    if isinstance(ours, list):
        return len(ours) == len(other) and all(map(same, ours, other))
    if hasattr(ours, "items"):
        return dict(ours).keys() == dict(other).keys() and all(
            same(value, other[name]) for name, value in ours.items()
        )
    return bool(ours == other)


def count_early(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whether batches were as they had been loaded, in order."""
    taken = early_batches._Early.taken
    found: list[str] = []

    def noted(self: Any, iterator: Any, load: Any) -> Any:
        batch = taken(self, iterator, load)
        found.append("early" if batch is self._batch else "anew")
        return batch

    monkeypatch.setattr(early_batches._Early, "taken", noted)
    return found


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("kind", ["plain", "shuffled", "masked"])
def test_batches_and_random_numbers_are_stocks(
    kind: str, draws: bool, tmp_path: Any, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    loader = masked_rows(tmp_path) if kind == "masked" else None
    loader = loader or DataLoader(rows(), batch_size=4, shuffle=kind == "shuffled")
    stock = seen(loader, draws=draws)
    request.getfixturevalue("early")
    found = count_early(monkeypatch)
    assert same(seen(loader, draws=draws), stock)
    # All but the first of an epoch, which begins with numbers; who draws changes those of masks.
    expected = "anew" if draws and kind == "masked" else "early"
    assert found == [expected] * 15


def test_a_batch_that_cannot_be_loaded_fails_when_it_is_asked_for(
    early: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader: Any = DataLoader(Subset(rows(), [0, 1, 2, 3, 4, 99]), batch_size=2)
    found = count_early(monkeypatch)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
        beside.launched()
    with pytest.raises(IndexError) as raised:
        next(batches)
    assert found == ["early"]
    assert "early" not in str(raised.value)


class Own(TensorDataset):
    """A data set that may do anything when it is asked."""


@pytest.mark.parametrize("kind", ["data", "sampler", "collate", "shared", "repeated", "workers"])
def test_what_may_do_something_else_is_left_alone(
    kind: str, early: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows()
    given: dict[str, Any] = {
        "data": {},
        "sampler": {"sampler": list(range(5))},
        "collate": {"collate_fn": lambda batch: batch},
        "shared": {"sampler": RandomSampler(data, generator=torch.Generator())},
        "repeated": {"sampler": RandomSampler(data, replacement=True)},
        "workers": {"num_workers": 1},
    }[kind]
    loader: Any = DataLoader(Own(*data.tensors) if kind == "data" else data, batch_size=2, **given)
    found = count_early(monkeypatch)
    for _ in loader:
        beside.launched()
    assert found == []


def test_another_thread_loads_its_own(early: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    found = count_early(monkeypatch)
    batches = iter(DataLoader(rows(), batch_size=4))
    next(batches)
    thread = threading.Thread(target=beside.launched)
    thread.start()
    thread.join()
    next(batches)
    assert found == []


def test_nothing_is_loaded_early_any_more_once_it_is_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = contract.Changes()
    early_batches.install(changes)
    found = count_early(monkeypatch)
    batches = iter(DataLoader(rows(), batch_size=4))
    next(batches)
    beside.launched()
    next(batches)
    changes.undo()
    next(batches)
    beside.launched()
    assert len(list(batches)) == 3
    assert found == ["early"]
