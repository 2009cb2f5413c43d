"""Shows a search while it runs: one live picture in a terminal, lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deepytorch_core.tune.knobs import DEFAULTS, Setting, in_words
from deepytorch_core.tune.search import TuningTrial

_SHOWN = 12
_LONG_S = 120  # beyond it an estimate is said in minutes


class Progress:
    """A context manager around a search; tell it what begins and what has ended.

    Args:
        screen: where it is shown; rich honours NO_COLOR and TERM there.
        budget_steps: measured steps that the search may take.
    """

    def __init__(self, screen: Console, budget_steps: int) -> None:
        self._screen = screen
        self._budget = budget_steps
        self._spent = 0
        self._trials: list[tuple[str, TuningTrial]] = []
        self._default_s = math.nan
        self._best: TuningTrial | None = None
        self._now = "starting"
        self._began = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._screen.is_terminal and not self._screen.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._picture,
                console=self._screen,
                refresh_per_second=4,
                transient=True,  # the table of all trials follows
            )
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._now = ""
            self._live.__exit__(kind, error, traceback)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._screen.print(line, markup=False, soft_wrap=True)

    def begins(self, what: str) -> None:
        """Note what is being run now."""
        self._now = what

    def ended(
        self, name: str, trial: TuningTrial, best: TuningTrial | None, *, counts: bool = True
    ) -> None:
        """A trial is over; `best` is the fastest before it. `counts`: against the budget."""
        if trial.setting == DEFAULTS and math.isnan(self._default_s):
            self._default_s = trial.median_s
        self._spent += trial.steps if counts else 0
        if best is None or trial.beats(best):
            self._best = trial
        self._trials.append((name, trial))
        if self._live is None:
            told = _plain(trial, self._default_s, is_best=self._best is trial)
            self.say(f"{name:<11} {told}{self._outlook()}")

    def watched(
        self, name: Callable[[], str], measure: Callable[[Setting, TuningTrial | None], TuningTrial]
    ) -> Callable[[Setting, TuningTrial | None], TuningTrial]:
        """`measure`, shown as it runs; `name` gives the number of the next trial."""

        def shown(setting: Setting, best: TuningTrial | None) -> TuningTrial:
            number = name()
            self.begins(in_words(setting))
            trial = measure(setting, best)
            self.ended(number, trial, best)
            return trial

        return shown

    def _outlook(self) -> str:
        """Say which trial of about how many this was, and how long the rest takes at this pace."""
        if not self._spent or self._spent >= self._budget:
            return ""
        number = len(self._trials)
        most = max(number, round(number * self._budget / self._spent))
        left = (time.monotonic() - self._began) * (self._budget / self._spent - 1)
        shown = f"{left:.0f} s" if left < _LONG_S else f"{left / 60:.0f} min"
        return f"  (trial {number} of at most {most}, {shown} left at this pace)"

    def _picture(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("", "setting", "ms a step", "against defaults", ""):
            table.add_column(title, justify="left" if title in ("", "setting") else "right")
        for name, trial in self._trials[-_SHOWN:]:
            style = "green" if trial is self._best else "dim" if trial.problem else ""
            table.add_row(
                name,
                in_words(trial.setting),
                milliseconds(trial),
                against(trial, self._default_s),
                Text(remark(trial, is_best=trial is self._best)),
                style=style,
            )
        passed = time.monotonic() - self._began
        share = Text(f" {self._spent} of {self._budget} steps, {passed:.0f} s{self._outlook()}")
        bar = Table.grid()
        bar.add_row(ProgressBar(total=self._budget, completed=self._spent, width=30), share)
        running = Spinner("dots", Text(f" {self._now}")) if self._now else Text("")
        return Group(table, bar, running)


def _plain(trial: TuningTrial, default_s: float, *, is_best: bool) -> str:
    parts = (
        f"{in_words(trial.setting):<40}",
        f"{milliseconds(trial):>10} ms a step",
        f"{against(trial, default_s):>8}",
        remark(trial, is_best=is_best),
    )
    return "  ".join(parts).rstrip()


def milliseconds(trial: TuningTrial) -> str:
    """A trial's step time."""
    return f"{1e3 * trial.median_s:.2f}" if math.isfinite(trial.median_s) else "-"


def against(trial: TuningTrial, default_s: float) -> str:
    """How much more or less time than with the defaults."""
    change = trial.median_s / default_s - 1
    return f"{change:+.1%}" if math.isfinite(change) and trial.setting != DEFAULTS else ""


def remark(trial: TuningTrial, *, is_best: bool) -> str:
    """Say what came of a trial."""
    if trial.problem:
        return trial.problem
    if not trial.is_whole:
        return "clearly slower, ended early"
    return "best so far" if is_best and trial.setting != DEFAULTS else ""
