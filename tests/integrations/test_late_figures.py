"""Figures that TRL logs, read while the next step is launched: the very numbers of stock."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pytest
import torch
import trl
from accelerate import accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from deepytorch.integrations.seams import arm as seams
from deepytorch.integrations.seams import late_figures
from deepytorch.integrations.transformers import pack_batches
from deepytorch.recipes.data.text import byte_tokenizer
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.base.patching import Patches

NUM_STEPS = 6


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    monkeypatch.setattr(config, "_current", Options(log="error"))
    monkeypatch.setattr(late_figures, "_is_waited_for", lambda trainer: True)
    patches = Patches()
    patches.replace(Trainer, "training_step", seams._stepping)
    late_figures.of_accelerator(accelerator, patches)
    yield
    patches.undo()


@pytest.fixture
def awaited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the numbers that nobody waited for."""
    found: list[Any] = []

    class Noted(late_figures.Awaited):
        def __init__(self, value: Any) -> None:
            super().__init__(value)
            found.append(value)

    monkeypatch.setattr(late_figures, "Awaited", Noted)
    return found


class Logs(TrainerCallback):
    """Keeps the logs, and the types that the trainer holds whenever a callback may look."""

    trained: ClassVar[Any] = None  # the last trainer

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.kinds: set[type] = set()
        self.trainer: Any = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        left_out = ("runtime", "second")
        self.seen.append(
            {k: v for k, v in (logs or {}).items() if not any(word in k for word in left_out)}
        )

    def _look(self, *_: Any, **__: Any) -> None:
        metrics = self.trainer._metrics["train"]
        self.kinds |= {type(value) for values in metrics.values() for value in values}
        self.kinds.add(type(self.trainer._total_train_tokens))

    on_pre_optimizer_step = on_step_end = _look


class LooksAtMicroBatches(Logs):
    """Looks after each micro-batch, too."""

    on_substep_end = Logs._look


def made() -> Any:
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, **ids, vocab_size=len(tokenizer)))


def trained(
    model: Any,
    folder: Path,
    *,
    is_packed: bool = True,
    kind: Any = trl.SFTTrainer,
    looks: type[Logs] = Logs,
    **more: Any,
) -> Logs:
    rows = [{"text": "one two " * (1 + number % 5)} for number in range(4 * NUM_STEPS)]
    logs = looks()
    trainer = kind(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            max_length=64,
            **{"logging_steps": 1, **more},
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:5]),
        processing_class=byte_tokenizer(),
        callbacks=[logs],
    )
    logs.trainer = Logs.trained = trainer
    if is_packed:
        assert pack_batches(trainer.model, "on")
    trainer.train()
    return logs


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"gradient_accumulation_steps": 2, "logging_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=["each step", "accumulated", "evaluated"],
)
def test_what_is_logged_is_stocks_to_the_last_bit(
    how: dict[str, Any], tmp_path: Path, awaited: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()
    found = trained(copy.deepcopy(model), tmp_path, **how)
    num_late = len(awaited)
    # Entropy and accuracy of all steps but those that were watched.
    assert num_late == 2 * (NUM_STEPS - late_figures._WATCHED_STEPS)
    monkeypatch.setattr(late_figures, "_is_waited_for", lambda trainer: False)
    expected = trained(model, tmp_path, **how)
    assert len(awaited) == num_late
    assert found.seen == expected.seen
    assert found.kinds == expected.kinds
    assert found.kinds <= {int, float}


class Wrapped(trl.SFTTrainer):
    """Has TRL's step within one of its own."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class Plain(trl.SFTTrainer):
    """Changes nothing."""


class Indifferent(Logs):
    """Looks at logs alone."""

    on_pre_optimizer_step = TrainerCallback.on_pre_optimizer_step
    on_step_end = TrainerCallback.on_step_end


class LooksLater(Indifferent):
    """Looks as the next step begins."""

    on_step_begin = Logs._look


# When figures are read: after so many optimizer steps, and in a step's last micro-batch or before.
AT_ONCE, AT_ITS_END, A_STEP_LATER = (0, False), (0, True), (1, False)


@pytest.mark.parametrize(
    ("kind", "looks", "earliest", "kinds"),
    [
        (Plain, Indifferent, A_STEP_LATER, set()),
        (Plain, Logs, AT_ITS_END, {int, float}),
        (Plain, LooksLater, AT_ITS_END, {int, float}),
        (Plain, LooksAtMicroBatches, AT_ONCE, {int, float}),
        (Wrapped, Indifferent, AT_ONCE, set()),
    ],
    ids=["nobody", "after a step", "later", "after a micro-batch", "the step is another"],
)
def test_figures_are_read_before_somebody_looks(
    kind: Any,
    looks: type[Logs],
    earliest: tuple[int, bool],
    kinds: set[type],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more: dict[str, Any] = {"gradient_accumulation_steps": 2, "logging_steps": 2, "max_steps": 7}
    more |= {"kind": kind, "looks": looks}
    model = made()
    monkeypatch.setattr(late_figures, "_is_waited_for", lambda trainer: False)
    expected = trained(copy.deepcopy(model), tmp_path, **more)
    monkeypatch.setattr(late_figures, "_is_waited_for", lambda trainer: True)
    times: list[tuple[int, bool]] = []

    class Noted(late_figures.Awaited):
        def __init__(self, value: Any) -> None:
            super().__init__(value)
            self.step = Logs.trained.state.global_step

        def number(self) -> Any:
            steps = Logs.trained.state.global_step - self.step
            times.append((steps, GradientState().sync_gradients))
            return super().number()

    monkeypatch.setattr(late_figures, "Awaited", Noted)
    found = trained(model, tmp_path, **more)
    assert len(times) == 2 * (2 * 7 - late_figures._WATCHED_STEPS)
    assert min(times) == earliest
    assert found.seen == expected.seen
    assert found.kinds == expected.kinds == kinds


class Packing(TrainerCallback):
    """Has batches packed from some step on: a model's first steps show whether they may be."""

    begins = late_figures._MOST_STRANGE + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.begins:
            assert pack_batches(given["model"], "on")


def test_steps_before_batches_are_packed_tell_nothing(tmp_path: Path, awaited: list[Any]) -> None:
    class Later(trl.SFTTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(Packing())

        compute_loss = trl.SFTTrainer.compute_loss

    num_steps = Packing.begins + late_figures._WATCHED_STEPS + 3
    trained(made(), tmp_path, kind=Later, is_packed=False, max_steps=num_steps)
    assert len(awaited) == 2 * 3


class Own(trl.SFTTrainer):
    """Computes a loss of its own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Counting(trl.SFTTrainer):
    """Has TRL's loss, but counts tokens twice."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)

    @property
    def _total_train_tokens(self) -> int:
        return self._total

    @_total_train_tokens.setter
    def _total_train_tokens(self, total: int) -> None:
        self._total = total + (total - getattr(self, "_total", total))


@pytest.mark.parametrize(
    ("kind", "is_packed"), [(Own, True), (Counting, True), (trl.SFTTrainer, False)]
)
def test_who_does_something_else_reads_as_ever(
    kind: Any, is_packed: bool, tmp_path: Path, awaited: list[Any]
) -> None:
    logs = trained(made(), tmp_path, kind=kind, is_packed=is_packed)
    assert awaited == []
    assert len(logs.seen) == NUM_STEPS + 1


def test_a_step_that_fails_leaves_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backward, calls = accelerator.Accelerator.backward, []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) > late_figures._WATCHED_STEPS + 1:
            raise RuntimeError("lost")
        backward(*args, **kwargs)

    monkeypatch.setattr(accelerator.Accelerator, "backward", failing)
    trainers: list[Any] = []

    class Kept(trl.SFTTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            trainers.append(self)

    with pytest.raises(RuntimeError, match="lost"):
        trained(made(), tmp_path, kind=Kept)
    (values,) = (trainers[0]._metrics["train"][name] for name in ("entropy",))
    assert {type(value) for value in values} == {float}


def test_a_number_that_is_awaited_computes_as_numbers_do() -> None:
    awaited: Any = late_figures.Awaited(torch.tensor(2.5))
    assert awaited + 1 == 3.5
    assert 1 + awaited == 3.5
    assert awaited // 1 == 2.0
    assert sum([awaited, awaited]) / 2 == 2.5
    assert (float(awaited), int(awaited), bool(awaited)) == (2.5, 2, True)
    assert f"{awaited:.2f} {awaited}" == "2.50 2.5"
    assert awaited > 2
    assert awaited == 2.5
    assert hash(awaited) == hash(2.5)
