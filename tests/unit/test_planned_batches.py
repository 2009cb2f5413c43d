"""Tests of plans that are made before the model gets its batch: they hold for that batch alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepytorch.integrations.common import planned_batches
from deepytorch_core.data import plan


@pytest.fixture(autouse=True)
def _unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_batches, "_shifted", None)


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (5,), generator=generator)
    mask = (torch.arange(8) < lengths[:, None]).long()
    labels = torch.randint(1, 50, mask.shape, generator=generator).masked_fill(mask == 0, -100)
    return {"attention_mask": mask, "labels": labels}


def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def planned(*args: Any, **kwargs: Any) -> Any:
        found.append(plan(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(planned_batches, "plan", planned)
    return found


def asked(batch: dict[str, Tensor], **more: Any) -> Any:
    return planned_batches.plan_of(batch["attention_mask"], batch["labels"], **more)


def test_a_batch_is_planned_ahead_as_the_last_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plans_made(monkeypatch)
    first, second = batch_of(0), batch_of(1)
    planned_batches.plan_ahead(second)
    assert made == []  # nobody packs, as far as is known
    asked(first, shifted=True)
    planned_batches.plan_ahead(second)
    found = asked(second, shifted=True)
    assert found is made[-1]
    assert len(made) == 2
    expected = plan(second["attention_mask"], second["labels"])
    assert torch.equal(found.indices, expected.indices)
    assert (found.lengths, found.num_targets) == (expected.lengths, expected.num_targets)


@pytest.mark.parametrize("change", ["mask", "labels", "other labels", "shifted"])
def test_a_batch_that_was_changed_is_planned_anew(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plans_made(monkeypatch)
    asked(batch_of(0), shifted=True)
    batch = batch_of(1)
    planned_batches.plan_ahead(batch)
    if change == "mask":
        batch["attention_mask"][0, 0] = 0
    elif change == "labels":
        batch["labels"][:, 1] = -100
    elif change == "other labels":
        batch["labels"] = batch["labels"].clone()
    asked(batch, shifted=change != "shifted")
    assert len(made) == 3


@pytest.mark.parametrize("batch", [None, {}, {"attention_mask": [1, 1]}, [torch.ones(2, 2)]])
def test_what_is_no_such_batch_is_left_alone(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(batch_of(0), shifted=False)
    made = plans_made(monkeypatch)
    planned_batches.plan_ahead(batch)
    assert made == []
