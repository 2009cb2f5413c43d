"""What a run of `run --compare` sees of the script: its losses, its steps, ranks of its own."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.distributed import distributed_c10d
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from deepytorch.cli import runner
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


def test_the_first_step_leaves_a_mark(probe: Probe, tmp_path: Path) -> None:
    weight = torch.ones((), requires_grad=True)
    assert not (tmp_path / f"{STEPPED}0").exists()
    weight.backward()  # type: ignore[no-untyped-call]
    probe._stepped(None, (), {})
    assert (tmp_path / f"{STEPPED}0").exists()


def meet(rank: int, *others: int) -> tuple[int, ...]:
    distributed_c10d.rendezvous("env://", rank)  # type: ignore[attr-defined]
    return (rank, *others)


def test_processes_that_form_a_group_before_the_first_step_are_ranks(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[Any] = []
    monkeypatch.setattr(distributed_c10d, "rendezvous", lambda *args: met.append(args))
    fn = probe.accompanied(meet)
    sent = pickle.loads(pickle.dumps(fn))  # as to a process that is spawned
    assert not (tmp_path / OWN_RANKS).exists()
    assert sent(1, 2) == (1, 2)
    assert met == [("env://", 1)]
    assert (tmp_path / OWN_RANKS).exists()
    probe._steps = 1
    assert probe.accompanied(meet) is meet


def test_only_processes_that_the_script_waits_for_are_accompanied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True) -> None:
        started.append((fn, args, nprocs))

    for name in ("torch.multiprocessing.spawn", "torch.multiprocessing"):
        monkeypatch.setattr(sys.modules[name], "start_processes", start_processes)
    runner.warn_of_own_ranks(lambda fn: (fn, "accompanied"))  # type: ignore[arg-type, return-value]
    torch.multiprocessing.start_processes(print, (1,), nprocs=2)
    torch.multiprocessing.start_processes(fn=print, args=(1,))
    torch.multiprocessing.start_processes(print, (1,), 2, False)
    accompanied = (print, "accompanied")
    assert started == [(accompanied, (1,), 2), (accompanied, (1,), 1), (print, (1,), 2)]
    assert capsys.readouterr().err.count("the script starts processes itself") == 3


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_every_arm_is_watched_for_ranks_of_the_scripts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setenv("DEEPYTORCH_ENABLED", enabled)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(runner, "warn_of_own_ranks", seen.append)
    monkeypatch.setattr(probes, "watch", lambda probe, run: seen.append(probe.accompanied))
    Plan(steps=4, folder="", workspace="", outside="", began=0.0).write(tmp_path / "plan.json")
    runner.main(["--compare", str(tmp_path / "plan.json"), "train.py"])
    assert len(seen) == 2
    assert seen[0] == seen[1]
