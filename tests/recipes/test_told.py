# SPDX-License-Identifier: Apache-2.0
"""Steps' losses are read once the next step is under way, and none is lost."""

import os
import signal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deepytorch.recipes import bert_mlm
from deepytorch.recipes.base.run import StepProgress
from deepytorch.recipes.runner import loop
from deepytorch.recipes.runner.step_log import Telling
from deepytorch.recipes.runner.trainer import Trainer

STEPS = 7
# The texts are this file's lines: to encode the usual ones takes longer than all else in a run.
TINY = [
    *(f"data={__file__}", "device=cpu", "hidden_size=32", "num_layers=1", "num_heads=2"),
    "max_length=32",
    *("held_out=2", "batch_size=2", f"steps={STEPS}", "warmup_steps=1"),
]


class AsOnAGpu(Telling):
    """Reads as late as where a device computes beside the program."""

    def __init__(self, process):
        super().__init__(process)
        assert self._lag == 0  # nothing is computed beside the program here
        self._lag = 1


def train(output_dir, *words):
    return bert_mlm.main([*TINY, f"output_dir={output_dir}", *words])


def scalars(output_dir, name="loss"):
    (run_dir,) = output_dir.iterdir()
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(f"train/{name}")}


@pytest.fixture
def events(monkeypatch):
    """("step", n) as the training has launched step n; ("read", n) as its loss is shown."""
    found = []
    step, update = Trainer.step, StepProgress.update

    def stepping(self, micro_batches):
        result = step(self, micro_batches)
        found.append(("step", sum(kind == "step" for kind, _ in found) + 1))
        return result

    def updating(self, number, text):
        found.append(("read", number))
        update(self, number, text)

    monkeypatch.setattr(Trainer, "step", stepping)
    monkeypatch.setattr(StepProgress, "update", updating)
    return found


def test_a_loss_is_read_when_the_next_step_is_under_way(tmp_path, monkeypatch, events):
    assert train(tmp_path / "at-once") == 0
    expected = [(kind, number) for number in range(1, STEPS + 1) for kind in ("step", "read")]
    assert events == expected
    events.clear()
    monkeypatch.setattr(loop, "Telling", AsOnAGpu)
    assert train(tmp_path / "late") == 0
    late = [("step", 1)]
    for number in range(2, STEPS + 1):
        late += [("step", number), ("read", number - 1)]
    assert events == [*late, ("read", STEPS)]
    # Every step has its own numbers, those of a run that reads at once.
    assert scalars(tmp_path / "late") == scalars(tmp_path / "at-once")
    for name in ("learning_rate", "step_time_s"):
        assert set(scalars(tmp_path / "late", name)) == set(range(1, STEPS + 1))
    assert all(seconds > 0 for seconds in scalars(tmp_path / "late", "step_time_s").values())


def test_what_is_saved_or_evaluated_has_its_losses_read(tmp_path, monkeypatch, events):
    monkeypatch.setattr(loop, "Telling", AsOnAGpu)
    assert train(tmp_path, "save_every=3", "evaluate_every=2") == 0
    pending = 0
    for kind, number in events:
        if kind == "step":
            assert number - pending <= 2  # never more than one behind
            if (number - 1) % 3 == 0 or (number - 1) % 2 == 0:
                assert pending == number - 1
        else:
            pending = number
    assert pending == STEPS
    assert set(scalars(tmp_path)) == set(range(1, STEPS + 1))


def test_who_is_told_to_end_does_so_a_step_later_and_goes_on_alike(tmp_path, monkeypatch, capsys):
    assert train(tmp_path / "whole") == 0
    monkeypatch.setattr(loop, "Telling", AsOnAGpu)
    update = StepProgress.update

    def told(self, step, text):
        update(self, step, text)
        if step == 2:  # while the third is under way
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(StepProgress, "update", told)
        assert train(tmp_path / "ended") == 0
    assert "ended       after step 5" in capsys.readouterr().out
    assert set(scalars(tmp_path / "ended")) == set(range(1, 6))
    (run_dir,) = (tmp_path / "ended").iterdir()
    assert train(tmp_path / "ended", f"resume={run_dir}") == 0
    assert scalars(tmp_path / "ended") == scalars(tmp_path / "whole")


def test_a_loss_that_is_none_is_shown_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "Telling", AsOnAGpu)
    step = Trainer.step

    def broken(self, micro_batches):
        result = step(self, micro_batches)
        result.loss_share.fill_(torch.nan)
        return result

    shown = []
    monkeypatch.setattr(Trainer, "step", broken)
    monkeypatch.setattr(StepProgress, "update", lambda self, step, text: shown.append(text))
    assert train(tmp_path) == 0
    assert len(shown) == STEPS
    assert all(text.startswith("loss nan") for text in shown)
