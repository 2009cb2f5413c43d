"""The report that `deepytorch tune` shows at the end, and the files that it writes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from deepytorch.cli import console
from deepytorch.cli.tune.progress import against, milliseconds, remark
from deepytorch_core.tune.knobs import DEFAULTS, Setting, as_dict, in_words, layers_of
from deepytorch_core.tune.search import TuningTrial

if TYPE_CHECKING:
    from deepytorch.cli.tune.outcome import Outcome
    from deepytorch_core.tune.confirm import Confirmation

Repeat = Callable[[Setting], TuningTrial]


def details(outcome: Outcome, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the profile and the record hold besides the settings, of JSON's types."""
    from deepytorch_core.base import provenance

    repeated = outcome.confirmation
    rounds = {}
    if repeated is not None:
        names = {"defaults": DEFAULTS, "tuned": repeated.winner}
        if repeated.single_layer is not None:
            names["single_layer"] = repeated.single_layer
        rounds = {
            name: [_of(trial) for trial in repeated.trials[setting]]
            for name, setting in names.items()
        }
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arguments": list(arguments),
        "loss_checked": outcome.sees_losses,
        "left_out": list(outcome.space.left_out),
        "tried": [_of(trial) for trial in outcome.trials],
        "best": as_dict(outcome.best.setting),
        "rounds": rounds,
        **provenance.provenance(),
    }


def _of(trial: TuningTrial) -> dict[str, Any]:
    return {
        "settings": as_dict(trial.setting),
        "step_ms": 1e3 * trial.median_s if math.isfinite(trial.median_s) else None,
        "steps_ms": [1e3 * seconds for seconds in trial.step_s],
        "problem": trial.problem,
        "whole": trial.is_whole,
        **({"output": trial.output} if trial.output else {}),
    }


def write(path: Path, found: Mapping[str, Any]) -> None:
    """The record of `--json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def show(outcome: Outcome, files: Sequence[tuple[str, str]]) -> None:
    """The table of what was tried, the verdict, the files and what to do next."""
    out = console.out()
    out.print(_table(outcome))
    out.print(console.fields("", [*_findings(outcome), *files]))


def _table(outcome: Outcome) -> Table:
    default_s = next(trial.median_s for trial in outcome.trials if trial.setting == DEFAULTS)
    table = Table(title="\nwhat was tried", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("setting", overflow="fold")
    table.add_column("layers")
    table.add_column("ms a step", justify="right", no_wrap=True)
    table.add_column("against defaults", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for trial in outcome.trials:
        is_best = trial is outcome.best
        words = [remark(trial, is_best=is_best).replace("best so far", "best")]
        words += _repeated(trial.setting, outcome.confirmation)
        table.add_row(
            in_words(trial.setting),
            ", ".join(layers_of(trial.setting)),
            milliseconds(trial),
            against(trial, default_s),
            Text(", ".join(filter(None, words))),
            style="bold" if is_best else "",
        )
    return table


def _repeated(setting: Setting, repeated: Confirmation | None) -> list[str]:
    """Return what the rounds say of a setting that took part in them."""
    if repeated is None or setting not in repeated.medians_ms:
        return []
    words = ["best of one layer"] if setting == repeated.single_layer else []
    words.append(f"repeated: {repeated.medians_ms[setting]:.2f} ms")
    return [*words, "fastest"] if setting == repeated.fastest else words


def _findings(outcome: Outcome) -> list[tuple[str, str]]:
    tuned, repeated = outcome.tuned, outcome.confirmation
    rows = []
    if repeated is not None and (medians := repeated.medians_ms):
        times = [
            f"{median_ms:.2f} ms with "
            f"{in_words(setting) if setting != DEFAULTS else 'the defaults'}"
            for setting, median_ms in medians.items()
        ]
        counts = {len(trials) for trials in repeated.trials.values() if trials}
        jobs = f"{'up to ' if len(counts) > 1 else ''}{max(counts)}"
        rows.append(
            ("repeated", f"{', '.join(times)} (medians of {jobs} fresh jobs each, in turns)")
        )
    kept = in_words(tuned.setting) if tuned.setting != DEFAULTS else "the defaults"
    rows.append(("kept", f"{kept}: {tuned.reason}"))
    if not outcome.sees_losses:
        rows.append(("note", "the script's loss was not seen, so it was not compared"))
    rows += [("left out", line) for line in outcome.space.left_out]
    rows += [("note", line) for line in outcome.remarks]
    return rows
