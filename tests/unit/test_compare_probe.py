"""Tests what `run --compare` sees of the script: its losses, its steps, ranks of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from deepytorch.cli import runner
from deepytorch.integrations.seams import arm, plain
from deepytorch_core.compare import probe as probes
from deepytorch_core.compare.plan import Plan
from deepytorch_core.compare.probe import OWN_RANKS, STEPPED, Probe

Scale = Callable[[Any], Any]


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    """One that watches backward and GradScaler, in this process until the test is over."""
    folder = str(tmp_path)
    found = Probe(Plan(steps=4, folder=folder, workspace=folder, outside=folder, began=0.0))
    monkeypatch.setattr(
        torch.autograd, "backward", found._watched_backward(torch.autograd.backward)
    )
    for scaler in (torch.amp.GradScaler, ShardedGradScaler):
        monkeypatch.setattr(scaler, "scale", scaler.scale)  # puts it back when the test is over
        found._watch_scaler(scaler)
    return found


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return 2 * value

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


def in_place(loss: torch.Tensor, scale: Scale) -> None:
    scaled = scale(loss)
    scaled /= 2
    scaled.backward()


def two_at_once(loss: torch.Tensor, scale: Scale) -> None:
    first, second = scale([loss / 4, loss])
    (first + second).backward()


def two_before_either_backward(loss: torch.Tensor, scale: Scale) -> None:
    first, second = scale(loss / 4), scale(loss)
    first.backward(retain_graph=True)
    second.backward()


def beside_one_that_is_not_scaled(loss: torch.Tensor, scale: Scale) -> None:
    scale(loss).backward(retain_graph=True)
    (loss + 1).backward()


@pytest.mark.parametrize(
    ("trains", "seen"),
    [
        (lambda loss, scale: scale(loss).backward(), 3.0),
        (lambda loss, scale: (scale(loss) / 2).backward(), 1.5),
        (lambda loss, scale: Doubled.apply(scale(loss)).backward(), 6.0),
        (lambda loss, scale: scale(Doubled.apply(loss)).backward(), 6.0),
        (lambda loss, scale: (scale(loss / 3) + scale(loss)).backward(), 4.0),
        (lambda loss, scale: scale(loss.expand(4)).mean().backward(), 3.0),
        (in_place, 1.5),
        (two_at_once, 3.75),
        (two_before_either_backward, 3.75),
        (beside_one_that_is_not_scaled, 7.0),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
        lambda: torch.amp.GradScaler("cpu", enabled=False),
        lambda: ShardedGradScaler("cpu", init_scale=1024.0),
    ],
    ids=["scaled", "off", "fsdp"],
)
def test_a_loss_is_shown_without_the_scalers_factor(
    probe: Probe,
    trains: Callable[[torch.Tensor, Scale], None],
    seen: float,
    make: Callable[[], Any],
) -> None:
    weight = torch.ones((), requires_grad=True)
    scaler = make()
    trains(weight * 3, scaler.scale)
    if scaler.is_enabled():
        scaler._scale *= 2  # as update() does, in place
    assert probes._total(probe._since_step) == pytest.approx(seen)


def test_a_loss_is_seen_within_a_step_that_a_seam_stands_around(probe: Probe) -> None:
    weight = torch.ones((), dtype=torch.float32, requires_grad=True)

    def training_step(trainer: Any) -> torch.Tensor:
        loss = weight * 2
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    arm._stepping(training_step)(None)
    assert probes._total(probe._since_step) == 2.0
    names = {"act": weight.backward, "__name__": plain.__name__}
    exec("def tried():\n    act()", names)
    names["tried"]()
    assert len(probe._since_step) == 1, "what a seam tries is none of the script's"


def test_the_first_step_leaves_a_mark(probe: Probe, tmp_path: Path) -> None:
    weight = torch.ones((), requires_grad=True)
    assert not (tmp_path / f"{STEPPED}0").exists()
    weight.backward()  # type: ignore[no-untyped-call]
    probe._stepped(torch.optim.SGD([weight]), (), {})
    assert (tmp_path / f"{STEPPED}0").exists()


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_every_arm_is_watched_for_ranks_of_the_scripts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setenv("DEEPYTORCH_ENABLED", enabled)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(runner, "watch_for_own_ranks", lambda *told: seen.append(told))
    monkeypatch.setattr(probes, "watch", lambda probe, run: seen.append(probe))
    Plan(steps=4, folder="", workspace="", outside="", began=0.0).write(tmp_path / "plan.json")
    runner.main(["--compare", str(tmp_path / "plan.json"), "train.py"])
    (companion, is_wanted), probe = seen
    assert companion.mark == str(Path(OWN_RANKS)) == probe.own_ranks
    assert is_wanted()
    probe._steps = 1  # who trains by itself may start what it likes
    assert not is_wanted()
