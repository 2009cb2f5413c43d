"""Chooses settings to try next, within a budget of steps: coordinate descent, then pairs.

Every knob in turn is tried alone at its other values, from the best setting so far; a value stays
if it is faster beyond the noise. For sizes, half and twice the fastest are tried as well. Passes
are repeated until one changes nothing: a value that pays only beside another one is found when that
other one has been. The rest of the budget goes to changes of two knobs at once, for settings of
which neither pays alone. Those come first that promise most by a model without interactions, fitted
to all that was measured.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepytorch_core.guard import timing
from deepytorch_core.tune.knobs import DEFAULTS, Knob, Setting, layers_of


@dataclass(frozen=True, kw_only=True)
class TuningTrial:
    """A setting, and what came of it.

    Args:
        setting: what was tried.
        step_s: seconds of its measured steps; empty where it failed.
        steps: what it took from the budget.
        problem: why it can't be chosen; "" if it can.
        is_whole: whether all its steps were measured; a clearly slower one is ended early.
        output: what its processes wrote, where it failed.
    """

    setting: Setting
    step_s: tuple[float, ...]
    steps: int
    problem: str = ""
    is_whole: bool = True
    output: str = ""

    @property
    def median_s(self) -> float:
        """Seconds of a step; infinite for a trial that can't be chosen."""
        return statistics.median(self.step_s) if self.step_s and not self.problem else math.inf

    def beats(self, other: TuningTrial) -> bool:
        """Whether it is faster beyond the noise of both."""
        if self.problem or not self.step_s or not self.is_whole:
            return False
        return not other.step_s or timing.is_faster(self.step_s, other.step_s)


Measure = Callable[[Setting, TuningTrial | None], TuningTrial]
"""Tries a setting; also given the best trial so far, to end early what is clearly slower."""


class Search:
    """A search over `knobs` that spends at most `budget_steps` measured steps.

    Args:
        knobs: the dimensions; each also has its default, which is not among its values.
        measure: see Measure.
        steps: of a whole trial.
        budget_steps: of all trials together.
    """

    def __init__(
        self, knobs: Sequence[Knob], measure: Measure, *, steps: int, budget_steps: int
    ) -> None:
        self._knobs = knobs
        self._measure = measure
        self._steps = steps
        self._left = budget_steps
        self._seen: dict[Setting, TuningTrial] = {}
        self.best: TuningTrial | None = None

    @property
    def trials(self) -> list[TuningTrial]:
        """All that was tried, in order."""
        return list(self._seen.values())

    def start_from(self, trial: TuningTrial) -> None:
        """Begin at the defaults, which were measured already; their steps count."""
        self._left -= trial.steps
        self._seen[trial.setting] = self.best = trial

    def run(self) -> TuningTrial:
        """Search until the budget is spent or nothing is left to try; the best trial."""
        if self.best is None:
            self._try(DEFAULTS)
        while self._has_budget():
            if self._descend() or self._try_pairs():
                continue
            break
        assert self.best is not None
        return self.best

    def contender(self, again: TuningTrial) -> TuningTrial:
        """The trial that is worth confirming, or the defaults' own if there is none.

        Args:
            again: the defaults, measured once more. Jobs differ among themselves by more than the
                steps within one, so a lucky first run of theirs must not hide what is faster.
        """
        first = self._seen[DEFAULTS]
        default_s = statistics.median((*first.step_s, *again.step_s))
        others = [
            trial
            for trial in self._seen.values()
            if trial is not first and trial.is_whole and trial.median_s < default_s
        ]
        return min(others, key=lambda trial: trial.median_s, default=first)

    def best_of_one_layer(self) -> TuningTrial | None:
        """The fastest whole trial whose settings are all of one layer; None without any."""
        alone = [
            trial
            for trial in self._seen.values()
            if trial.is_whole and not trial.problem and len(layers_of(trial.setting)) == 1
        ]
        return min(alone, key=lambda trial: trial.median_s, default=None)

    def _has_budget(self) -> bool:
        return self._left >= self._steps

    def _descend(self) -> bool:
        """One pass over the knobs; whether it changed the best."""
        changed = False
        for knob in self._knobs:
            before = self.best
            assert before is not None
            alternatives = _alternatives(before.setting, knob)
            for setting in alternatives:
                if self._is_open(setting) and self._has_budget():
                    self._try(setting)
            self._refine(knob, [before.setting, *alternatives])
            changed = changed or self.best is not before
        return changed

    def _refine(self, knob: Knob, settings: Sequence[Setting]) -> None:
        """From the fastest of them on to half and twice its value, as long as that is faster.

        That it seems to be faster is enough: a sharper value may show what noise hides of a coarse
        one.
        """
        tried = [self._seen[setting] for setting in settings if setting in self._seen]
        done = None
        while (fastest := min(tried, key=lambda trial: trial.median_s)) is not done:
            done = fastest
            for setting in _beside(fastest.setting, knob):
                if self._is_open(setting) and self._has_budget():
                    tried.append(self._try(setting))

    def _try_pairs(self) -> bool:
        """Changes of two knobs, the most promising first, until one is better; whether one was."""
        before = self.best
        while self._has_budget():
            found = self._most_promising()
            if found is None:
                return False
            self._try(found)
            if self.best is not before:
                return True
        return False

    def _most_promising(self) -> Setting | None:
        assert self.best is not None
        known = [trial for trial in self._seen.values() if math.isfinite(trial.median_s)]
        mean = statistics.fmean(math.log(trial.median_s) for trial in known)

        def effect(name: str, value: int | None) -> float:
            seen = [
                math.log(trial.median_s) - mean
                for trial in known
                if dict(trial.setting).get(name) == value
            ]
            return statistics.fmean(seen) if seen else math.inf  # not tried yet

        def cost(setting: Setting) -> float:
            values = dict(setting)
            return sum(effect(knob.name, values.get(knob.name)) for knob in self._knobs)

        pairs = {
            setting
            for first, second in itertools.combinations(self._knobs, 2)
            for alternative in _alternatives(self.best.setting, first)
            for setting in _alternatives(alternative, second)
            if self._is_open(setting)
        }
        # Sorted, so that equals come in the same order in every run.
        costs = {setting: cost(setting) for setting in sorted(pairs, key=sorted)}
        found = min(costs, key=lambda setting: costs[setting], default=None)
        return found if found is not None and math.isfinite(costs[found]) else None

    def _is_open(self, setting: Setting) -> bool:
        """Whether it was not tried yet, and has no value that failed with whatever it was tried."""
        if setting in self._seen:
            return False
        for pair in setting:
            tried = [trial for trial in self._seen.values() if pair in trial.setting]
            if tried and all(trial.problem for trial in tried):
                return False
        return True

    def _try(self, setting: Setting) -> TuningTrial:
        trial = self._measure(setting, self.best)
        self._left -= trial.steps
        self._seen[setting] = trial
        if self.best is None or trial.beats(self.best):
            self.best = trial
        return trial


def _alternatives(setting: Setting, knob: Knob) -> list[Setting]:
    """`setting` with every other value of one knob, its default last."""
    now = dict(setting).get(knob.name)
    return [_with(setting, knob, value) for value in (*knob.values, None) if value != now]


def _beside(setting: Setting, knob: Knob) -> list[Setting]:
    """`setting` with half and twice its value of a knob, where these are valid.

    No more than the most that is tried anyway: from there on larger ones may all be the same.
    """
    now = dict(setting).get(knob.name)
    if not knob.is_graded or now is None:
        return []
    valid = range(knob.least, max(knob.values) + 1)
    values = [value for value in (now // 2, 2 * now) if value in valid and value % knob.step == 0]
    return [_with(setting, knob, value) for value in values]


def _with(setting: Setting, knob: Knob, value: int | None) -> Setting:
    """`setting` with another value of one knob; None is its default."""
    changed = {name: other for name, other in setting if name != knob.name}
    if value is not None:
        changed[knob.name] = value
    return frozenset(changed.items())
