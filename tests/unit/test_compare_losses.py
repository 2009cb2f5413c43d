"""Differences of losses that make a run another training, and what is not claimed of it then."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepytorch.cli import compare, launcher
from deepytorch.cli.compare import report
from deepytorch_core.base.errors import CompareError
from deepytorch_core.compare import nudge, result
from deepytorch_core.compare.losses import agreement
from deepytorch_core.compare.receipt import write
from deepytorch_core.compare.result import NUDGED, OTHERWISE, Sample, judge
from deepytorch_core.report import page as report_page

STEPS = 40


def run(arm: str, losses: Sequence[float | None], **changes: Any) -> Sample:
    """Return a run of stock's speed, or one twice as fast."""
    values: dict[str, Any] = {"arm": arm, "steps": len(losses), "losses": tuple(losses)}
    values |= {"block_s": (1.0 if arm == "stock" else 0.5,), "setup_s": 1.0, "is_complete": True}
    values |= {"peak_bytes": None, "device": "cpu", "redirected": (), "made_folders": ()}
    values |= {"seams": (), "native_calls": 8, "decisions": (), "loss_ranks": 1}
    return Sample(**{**values, **changes})


def job(steps: int = 30) -> compare.Job:
    arguments = ("--nproc-per-node=1", "train.py")
    return compare.Job(
        arguments=arguments,
        options=launcher.parse(arguments, command="run", default_processes="1"),
        default_processes="1",
        world_size=1,
        steps=steps,
        rounds=2,
        arms=("stock", "deepytorch"),
        timeout_s=1.0,
    )


class Trained:
    """Losses of a small network, as scripts train it: rightly, otherwise, and wrongly."""

    def __init__(self, steps: int = STEPS, *, dropout: float = 0.0) -> None:
        self.steps, self.dropout = steps, dropout

    def __call__(
        self,
        *,
        rate: float = 0.5,
        draws: int = 0,
        is_nudged: bool = False,
        change: Callable[[int, Any], None] | None = None,
        order: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> tuple[float, ...]:
        torch.manual_seed(0)
        data = torch.Generator().manual_seed(1)
        x = torch.randn(STEPS * 16, 12, generator=data)
        y = (x @ torch.randn(12, 5, generator=data)).argmax(dim=1)
        layers = [torch.nn.Linear(12, 48), torch.nn.ReLU(), torch.nn.Dropout(self.dropout)]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(48, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        torch.manual_seed(2 + draws)
        losses = []
        for step in range(self.steps):
            rows = order(torch.arange(16 * step % len(x), 16 * step % len(x) + 16))
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if change is not None:
                change(step, model)
            optimizer.step()
            if is_nudged and step == 0:
                nudge.Nudge(is_redrawn=self.dropout > 0).after(optimizer)
            losses.append(loss.item())
        return tuple(losses)


def apart(stock: Sequence[float], ours: Sequence[float], nudged: Sequence[float]) -> str | None:
    """By two runs of each, and one of stock that was nudged."""
    samples = [run("stock", stock), run("ours", ours), run("stock", stock), run("ours", ours)]
    verdict = judge([*samples, run(NUDGED, nudged)], "ours")
    assert (verdict.word == OTHERWISE) == (verdict.losses.apart is not None)
    return verdict.losses.apart


def scaled(factor: float, *, first: int = 0) -> Callable[[int, Any], None]:
    """Gradients that are so many times too large, as where ranks are summed, not averaged."""

    def change(step: int, model: Any) -> None:
        if step >= first:
            for parameter in model.parameters():
                parameter.grad *= factor

    return change


def frozen(step: int, model: Any) -> None:
    model[0].weight.grad.zero_()


WRONG = {
    "half of the gradients": {"change": scaled(0.5)},
    "twice the gradients": {"change": scaled(2.0)},
    "another sign": {"change": scaled(-1.0)},
    "another learning rate": {"rate": 0.6},
    "a layer that is not trained": {"change": frozen},
    "wrong from the middle on": {"change": scaled(3.0, first=STEPS // 2)},
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_run_is_told_and_not_called_faster(how: str) -> None:
    train = Trained()
    assert apart(train(), train(**WRONG[how]), train(is_nudged=True)) is not None


# Others do less to the losses of so few steps than dropout's chance does.
@pytest.mark.parametrize("how", ["half of the gradients", "twice the gradients", "another sign"])
def test_a_wrong_run_is_told_also_with_dropout(how: str) -> None:
    train = Trained(dropout=0.1)
    assert apart(train(), train(draws=9, **WRONG[how]), train(is_nudged=True)) is not None


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("steps", [8, STEPS, 200])
def test_rounding_and_other_random_numbers_are_no_other_training(
    steps: int, dropout: float
) -> None:
    train = Trained(steps, dropout=dropout)
    stock, nudged = train(), train(is_nudged=True)
    assert apart(stock, stock, nudged) is None
    for draws in range(1, 4):
        if dropout:
            assert apart(stock, train(draws=draws), nudged) is None
        else:  # sums in another order
            assert apart(stock, train(order=lambda rows: rows.flip(0)), nudged) is None


LOSSES = (3.0, 2.0, 1.5, 1.2, 1.1, 1.0)


def changed(step: int, loss: float | None) -> tuple[float | None, ...]:
    return (*LOSSES[:step], loss, *LOSSES[step + 1 :])


@pytest.mark.parametrize(
    ("stock", "ours", "why"),
    [
        (LOSSES, changed(2, math.nan), "its loss is nan at step 3, where stock's is 1.5"),
        (LOSSES, changed(5, math.inf), "its loss is inf at step 6, where stock's is 1"),
        (changed(4, math.nan), LOSSES, "its loss is 1.1 at step 5, where stock's is nan"),
        (changed(4, math.nan), changed(4, math.nan), None),
        (changed(4, math.inf), changed(4, math.nan), None),
        (LOSSES, changed(1, 2.5), "its loss is 0.5 off at step 2 (20.0% of it), where stock's"),
        (LOSSES, changed(0, 1.0), "its loss is 2 off at step 1"),  # the last one is the same
        (LOSSES, LOSSES[:4], "it took 4 steps, where stock's runs took 6"),
        (LOSSES, changed(3, None), "it has no loss to compare at step 4, where stock's runs have"),
        (changed(3, None), LOSSES, "it has a loss to compare at step 4, where stock's runs have n"),
        ((None,) * 6, (None,) * 6, None),
        (LOSSES, changed(5, 1.0005), None),  # rounding
        ((*LOSSES[:5], 1e-9), (*LOSSES[:5], 3e-9), None),  # of a loss that goes to zero
        ((*LOSSES[:5], 1e-9), (*LOSSES[:5], 1e-2), "its loss is 0.01 off at step 6"),
    ],
)
def test_the_whole_course_of_losses_counts(
    stock: tuple[float | None, ...], ours: tuple[float | None, ...], why: str | None
) -> None:
    found = agreement([run("stock", stock)] * 2, [run("ours", ours)] * 2)
    assert (found.apart or "").startswith(why or "")
    assert (found.apart is None) == (why is None)


def test_stocks_own_runs_are_the_yardstick() -> None:
    """As far as they lie apart by twice as many steps, three times."""
    flat = (1.0,) * STEPS

    def at(step: int, loss: float) -> tuple[float, ...]:
        return (*flat[:step], loss, *flat[step + 1 :])

    theirs = [run("stock", flat), run("stock", at(30, 1.1))]

    def why(step: int, loss: float) -> str | None:
        return agreement(theirs, [run("ours", at(step, loss))]).apart

    assert why(35, 1.25) is None
    assert why(15, 0.75) is None
    assert why(35, 1.45) is not None
    assert why(9, 1.25) is not None  # stock's are equal in the first twenty steps
    unsure = [run("stock", LOSSES), run("stock", changed(3, math.nan))]
    assert agreement(unsure, [run("ours", changed(3, math.nan))]).apart is None
    assert agreement(unsure, [run("ours", changed(0, math.nan))]).apart is not None


def test_a_constant_lag_within_the_noise_of_single_steps_is_told() -> None:
    chance = torch.Generator().manual_seed(3)
    noise = torch.randn(4, 400, generator=chance).double() * 0.05
    stock, other, ours, wrong = (3 + noise).tolist()
    theirs = [run("stock", stock), run("stock", other)]
    assert agreement(theirs, [run("ours", ours)]).apart is None
    found = agreement(theirs, [run("ours", [loss + 0.25 for loss in wrong])])
    assert "off in the median of half of the steps" in (found.apart or "")


def test_ranks_that_differ_are_another_training() -> None:
    def why(stock: dict[str, Any], ours: dict[str, Any]) -> str:
        return agreement([run("stock", LOSSES, **stock)], [run("ours", LOSSES, **ours)]).apart or ""

    alike, apart = {"is_replicated": True}, {"is_replicated": False}
    assert why(alike, apart).startswith("its ranks end with different weights, where stock's end")
    for stock, ours in ((alike, alike), (apart, apart), (apart, alike), ({}, apart)):
        assert why(stock, ours) == ""
    assert why({"loss_ranks": 2}, {"loss_ranks": 1}) == (
        "1 rank has a loss to compare, where in stock's runs 2 ranks have one"
    )


def rows_of(samples: Sequence[Sample], arm: str = "deepytorch") -> dict[str, str]:
    return dict(report.findings(job(), samples, [judge(samples, arm)], 1000))


def four(ours: Sequence[float | None], **changes: Any) -> list[Sample]:
    theirs, mine = run("stock", LOSSES), run("deepytorch", ours, **changes)
    return [theirs, mine, theirs, mine]


@pytest.mark.parametrize("ours", [changed(2, math.nan), changed(1, 2.5), changed(5, 0.1)])
def test_nothing_is_claimed_of_another_training(
    ours: tuple[float | None, ...], tmp_path: Path
) -> None:
    right = rows_of(four(LOSSES))
    assert "deepytorch is faster: 2.000x" in right["speed-up"]
    assert right["to keep"].startswith("deepytorch run")
    samples = four(ours)
    rows = rows_of(samples)
    assert rows["speed-up"].startswith("deepytorch: not the same training, so no speed-up is cl")
    assert rows["time saved"] == "none: not the same training"
    assert rows["to keep"].startswith("nothing: not the same training")
    everything = " ".join(rows.values())
    assert "2.000x" not in everything
    assert "faster" not in everything
    verdicts = [judge(samples, "deepytorch")]
    page = tmp_path / "receipt.html"
    write(page, samples, command="c", headline=report.headline(verdicts[0]), rows=[*rows.items()])
    assert "so no speed-up is claimed" in page.read_text()
    found = json.loads(json.dumps(result.summary(samples, verdicts, {}), allow_nan=False))
    assert found["verdicts"][0]["word"] == OTHERWISE
    assert found["verdicts"][0]["losses"]["apart"]
    report_page.write(page, {}, [found])
    assert "deepytorch: not the same training, so no speed-up is claimed: its loss" in (
        page.read_text()
    )
    assert "stock&#x27;s speed" not in page.read_text()


def test_a_slower_run_is_another_training_too() -> None:
    samples = [
        dataclasses.replace(sample, block_s=(2.0,)) for sample in four(changed(1, 2.5))[1::2]
    ]
    assert judge([run("stock", LOSSES)] * 2 + samples, "deepytorch").word == OTHERWISE


def test_other_random_numbers_are_said_and_how_much_they_do() -> None:
    samples = four(changed(3, 1.3), draws=(4, 4, 5, 6, 6, 6))
    samples[::2] = [
        dataclasses.replace(sample, draws=(4, 4, 4, 5, 5, 5)) for sample in samples[::2]
    ]
    judged = judge(samples, "deepytorch").losses
    assert (judged.drawn_from, judged.is_by_size) == (3, True)
    samples.append(run(NUDGED, changed(3, 1.25), draws=(4, 9, 9, 9, 9, 9)))
    rows = rows_of(samples)
    assert rows["random numbers"] == (
        "others than stock's from step 3 on, so dropout and noise differ; with others stock's "
        "losses differ by 0.05, too"
    )
    assert (
        "with weights moved by rounding and other random numbers: 0.05" in (rows["loss difference"])
    )
    assert "deepytorch is faster" in rows["speed-up"]
    assert "random numbers" not in rows_of(four(LOSSES))


@pytest.mark.parametrize(
    ("ours", "draws", "nudged"),
    [
        (LOSSES, (), None),
        (changed(2, math.nan), (), None),  # no chance explains it
        (changed(1, 2.5), (), (True, False)),
        (changed(1, 2.5), (7,) * 6, (True, True)),
    ],
)
def test_stock_is_nudged_where_that_decides(
    monkeypatch: pytest.MonkeyPatch,
    ours: tuple[float | None, ...],
    draws: tuple[int, ...],
    nudged: tuple[bool, bool] | None,
) -> None:
    asked: list[compare.Arm] = []

    def run_once(asked_for: compare.Job, arm: compare.Arm, remarks: list[str]) -> Sample:
        asked.append(arm)
        if arm.name == "deepytorch":
            return run(arm.name, ours, draws=draws)
        return run(arm.name, LOSSES, draws=(5,) * len(draws))

    monkeypatch.setattr(compare, "run_once", run_once)
    said: list[str] = []
    samples, _ = compare.compare(job(steps=6), said.append)
    extra = [(arm.is_nudged, arm.is_redrawn) for arm in asked[4:]]
    assert extra == ([] if nudged is None else [nudged])
    assert [sample.arm for sample in samples[4:]] == ([] if nudged is None else [NUDGED])
    assert ("one more run of stock" in said[-1]) == (nudged is not None)
    assert asked[0].variables == asked[-1].variables or nudged is None


def test_a_nudge_that_fails_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(asked_for: compare.Job, arm: compare.Arm, remarks: list[str]) -> Sample:
        if arm.is_nudged:
            raise CompareError("no luck")
        return run(arm.name, LOSSES if arm.name == "stock" else changed(1, 2.5))

    monkeypatch.setattr(compare, "run_once", run_once)
    samples, remarks = compare.compare(job(steps=6), lambda line: None)
    assert len(samples) == 4
    assert remarks == ["stock, nudged: no luck"]
    assert judge(samples, "deepytorch").word == OTHERWISE


def test_a_nudge_moves_weights_by_rounding_and_replicas_alike() -> None:
    models = [torch.nn.Linear(64, 64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    before = [parameter.detach().clone() for parameter in models[0].parameters()]
    for optimizer in optimizers:
        moving = nudge.Nudge(is_redrawn=False)
        for _ in range(3):  # once
            moving.after(optimizer)
    unit = torch.finfo(torch.float32).eps
    for old, new, other in zip(before, *(model.parameters() for model in models), strict=True):
        assert torch.equal(new, other)
        assert 0 < (new - old).abs().max() <= 2 * unit * old.abs().max()
    assert nudge.told_apart(optimizers[:1]) == nudge.told_apart(optimizers[1:])
    with torch.no_grad():
        models[1].bias[3] += 1e-3
    assert nudge.told_apart(optimizers[:1]) != nudge.told_apart(optimizers[1:])


def test_the_unit_is_that_of_the_least_precise_type() -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    assert nudge.coarsest(model(x).sum()) == torch.finfo(torch.float32).eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().sum()
    assert nudge.coarsest(loss) == torch.finfo(torch.bfloat16).eps
    assert nudge.coarsest(model.double()(x.double()).sum()) == torch.finfo(torch.float64).eps


def test_draws_are_told_and_begin_anew() -> None:
    torch.manual_seed(5)
    before = nudge.drawn()
    torch.nn.functional.dropout(torch.ones(3))
    assert nudge.drawn() != before
    torch.manual_seed(5)
    assert nudge.drawn() == before
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    nudge.Nudge(is_redrawn=False).after(optimizer)
    assert nudge.drawn() == before
    nudge.Nudge(is_redrawn=True).after(optimizer)
    assert nudge.drawn() != before
