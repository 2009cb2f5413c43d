"""Batches that were moved are known again, as long as nobody has changed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import data_loader
from torch import Tensor
from transformers import BatchEncoding

from deepytorch.integrations.common import contract, moved_batches

META = torch.device("meta")


@pytest.fixture(autouse=True)
def noted() -> Iterator[None]:
    changes = contract.Changes()
    moved_batches.install(changes)
    yield
    changes.undo()


def batch(kind: Callable[[Any], Any] = dict) -> Any:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    return kind({"attention_mask": mask, "labels": torch.tensor([[5, 6, -100], [7, 8, 9]])})


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_a_moved_batch_is_found_as_it_was_on_the_cpu(kind: Any) -> None:
    given, expected = batch(kind), batch()
    moved = data_loader.send_to_device(given, META)
    assert moved["labels"].device == META
    for name, expected_one in expected.items():
        found = moved_batches.find(moved[name])
        assert found is not None
        assert torch.equal(found, expected_one)


CHANGES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "mask in place": lambda b: b["attention_mask"].mul_(0),
    "a part of the mask": lambda b: b["attention_mask"][:, 0].fill_(0),
    "labels in place": lambda b: b["labels"].masked_fill_(b["attention_mask"] == 0, -100),
    "another mask": lambda b: b.update(attention_mask=b["attention_mask"].clone()),
    "other labels": lambda b: b.update(labels=b["labels"] + 1),
    "rows": lambda b: b.update({name: tensor[:1] for name, tensor in b.items()}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_batch_is_not_found(change: Callable[[dict[str, Tensor]], Any]) -> None:
    moved = data_loader.send_to_device(batch(), META)
    change(moved)
    assert None in [moved_batches.find(tensor) for tensor in moved.values()]


def test_a_batch_whose_memory_is_used_again_is_not_found() -> None:
    given = batch()
    moved = data_loader.send_to_device(given, META)
    given["labels"].fill_(3)
    assert moved_batches.find(moved["labels"]) is None
    assert moved_batches.find(moved["attention_mask"]) is not None


def test_where_sequences_begin_is_noted() -> None:
    row = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "position_ids": torch.tensor([[0, 1, 0]]),
        "cu_seq_lens_q": torch.tensor([0, 2, 3], dtype=torch.int32),
    }
    moved = data_loader.send_to_device(row, META)
    for name in ("position_ids", "cu_seq_lens_q"):
        assert moved_batches.on_host(moved[name]).tolist() == row[name].tolist()


def test_what_is_no_batch_is_moved_all_the_same() -> None:
    for given in (torch.ones(2), [torch.ones(2)], {"input_ids": torch.ones(2)}, {"labels": [1]}):
        data_loader.send_to_device(given, META)
    only_mask = {"attention_mask": torch.ones(1, 2)}
    moved = data_loader.send_to_device(only_mask, META)
    assert moved_batches.find(moved["attention_mask"]) is not None
    on_host = batch()
    data_loader.send_to_device(on_host, torch.device("cpu"))
    assert moved_batches.find(on_host["attention_mask"]) is None
