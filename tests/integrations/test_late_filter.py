"""The Trainer's mean of losses without those that are no numbers, told apart on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from deepytorch.integrations.seams import arm as seams
from deepytorch.integrations.seams import late_filter
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.base.patching import Patches

STEPS = 12
NOT_NUMBERS = {0: math.nan, 3: math.inf, 4: -math.inf, 9: math.nan, 10: math.nan}


class Losing(nn.Module):
    """Has a loss that is no number in some of its passes."""

    def __init__(self, not_numbers: dict[int, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5, -0.25], dtype=torch.float32))
        self.not_numbers = not_numbers
        self.passes = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        loss = (x * self.weight).square().mean()
        if (added := self.not_numbers.get(self.passes)) is not None:
            loss = loss + loss.detach() * 0 + torch.tensor(added, dtype=torch.float32)
        self.passes += 1
        return {"loss": loss}


def train(folder: Path, trainer_class: type[Trainer] = Trainer, **how: Any) -> list[Any]:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(2, dtype=torch.float32)} for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS // how.get("gradient_accumulation_steps", 1),
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_first_step=True,
        **how,
    )
    trainer = trainer_class(Losing(NOT_NUMBERS), arguments, train_dataset=rows)
    trainer.train()
    return [
        {name: value for name, value in row.items() if name in ("loss", "train_loss", "grad_norm")}
        for row in trainer.state.log_history
    ]


@pytest.fixture
def filtered(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The losses that were filtered late, on the CPU as on a GPU."""
    seen: list[Tensor] = []
    stock = late_filter._filtered

    def note(total: Tensor, loss: Any) -> Tensor:
        seen.append(loss)
        return stock(total, loss)

    monkeypatch.setattr(late_filter, "_is_waited_for", lambda loss: True)
    monkeypatch.setattr(late_filter, "_filtered", note)
    return seen


def with_ours(act: Callable[[], Any]) -> Any:
    patches = Patches()
    patches.replace(Trainer, "training_step", seams._stepping)
    try:
        return act()
    finally:
        patches.undo()


@pytest.mark.parametrize("logging_steps", [1, 2, 5])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_logged_losses_are_stocks_to_the_bit(
    logging_steps: int, accumulation: int, filtered: list[Tensor], tmp_path: Path
) -> None:
    how = {"logging_steps": logging_steps, "gradient_accumulation_steps": accumulation}
    stock = train(tmp_path / "stock", **how)
    ours = with_ours(lambda: train(tmp_path / "ours", **how))
    assert repr(ours) == repr(stock)
    assert len(filtered) == STEPS


def test_without_the_filter_losses_are_added_as_they_are(
    filtered: list[Tensor], tmp_path: Path
) -> None:
    how = {"logging_nan_inf_filter": False, "logging_steps": 2}
    stock = train(tmp_path / "stock", **how)
    assert repr(with_ours(lambda: train(tmp_path / "ours", **how))) == repr(stock)
    assert not filtered


def test_a_trainer_with_a_step_of_its_own_gets_a_plain_tensor(
    filtered: list[Tensor], tmp_path: Path
) -> None:
    seen: list[Any] = []

    class Own(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(super().training_step(*args, **kwargs))
            return seen[-1]

    with_ours(lambda: train(tmp_path, Own))
    assert [type(value) for value in seen] == [Tensor] * STEPS
    assert not filtered


def test_an_option_leaves_it_to_stock(filtered: list[Tensor], tmp_path: Path) -> None:
    config.set_current(Options(compile="off"))
    with_ours(lambda: train(tmp_path))
    assert not filtered


def test_a_late_loss_is_a_tensor_like_any_other(filtered: list[Tensor]) -> None:
    class Known:
        args = TrainingArguments(output_dir="unused", use_cpu=True, report_to="none")
        _globalstep_last_logged = 0

        def training_step(self) -> None: ...

    Known.training_step.__module__ = "transformers.trainer"
    loss = torch.tensor(2.5, dtype=torch.float32)
    late = late_filter.late(Known(), loss)
    assert type(late) is not Tensor
    assert late.item() == float(late) == 2.5
    for other in (late * 2, late.detach(), late.clone(), torch.stack([late, loss])):
        assert type(other) is Tensor
    assert str(late) == str(loss)
