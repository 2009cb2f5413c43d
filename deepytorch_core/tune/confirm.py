"""The winner of a search against the defaults, in fresh jobs that take turns.

The best of many noisy measurements looks better than it is. So it counts only if it repeats: in
rounds of one job each, in alternating order. A winner with settings of several layers also meets
the best of one layer alone, and must be faster than that: what a layer more brings has to repeat,
too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deepytorch_core.tune.knobs import DEFAULTS, Setting, in_words
from deepytorch_core.tune.search import TuningTrial

ROUNDS = 3
LEAST_WINS = 2
LEAST_GAIN = 0.03
"""How much faster a step must be in the median, as a share of the winner's time."""

Rounds = Sequence[Mapping[Setting, TuningTrial]]


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The rounds' jobs, and what is to stay; `reason` says why.

    Attributes:
        winner: of the search.
        single_layer: the best of one layer, where `winner` has settings of several.
        trials: each contestant's in the rounds that it and the defaults ended, DEFAULTS' too.
        kept: what repeated; DEFAULTS if nothing did.
        reason: what was seen of `kept`, or else of `winner`.
    """

    winner: Setting
    single_layer: Setting | None
    trials: Mapping[Setting, tuple[TuningTrial, ...]]
    kept: Setting
    reason: str

    @property
    def medians_ms(self) -> dict[Setting, float]:
        """A step's, of each contestant that ended a round."""
        return {
            contestant: 1e3 * statistics.median(trial.median_s for trial in trials)
            for contestant, trials in self.trials.items()
            if trials
        }

    @property
    def fastest(self) -> Setting | None:
        """In the median, of those that ended all rounds; None if no round was ended."""
        medians = self.medians_ms
        rounds = len(self.trials[DEFAULTS])
        all_along = [contestant for contestant in medians if len(self.trials[contestant]) == rounds]
        return min(all_along, key=lambda contestant: medians[contestant], default=None)

    @property
    def times_ms(self) -> dict[str, float]:
        """For the profile: a step with the defaults and with what was kept, else the winner."""
        medians = self.medians_ms
        tuned = self.winner if self.kept == DEFAULTS else self.kept
        if tuned not in medians:
            return {}
        return {"defaults": medians[DEFAULTS], "tuned": medians[tuned]}


def confirm(
    setting: Setting,
    measure: Callable[[Setting], TuningTrial],
    single_layer: Setting | None = None,
) -> Confirmation:
    """Run `setting`, `single_layer` if given, and the defaults in turns, and judge.

    One that fails takes part no more; without the defaults or without any other the rounds end.
    """
    contestants = [DEFAULTS, setting, *([] if single_layer is None else [single_layer])]
    rounds: list[dict[Setting, TuningTrial]] = []
    failed: dict[Setting, str] = {}
    for number in range(ROUNDS):
        still = [contestant for contestant in contestants if contestant not in failed]
        if DEFAULTS in failed or len(still) < 2:
            break
        rounds.append({})
        first = number % len(still)  # nobody always comes first
        for contestant in (*still[first:], *still[:first]):
            trial = measure(contestant)
            if not trial.problem:
                rounds[-1][contestant] = trial
                continue
            failed[contestant] = f"failed when repeated: {trial.problem}"
            if contestant == DEFAULTS or len(failed) == len(contestants) - 1:
                break
    return judge(setting, rounds, single_layer=single_layer, failed=failed)


def judge(
    setting: Setting,
    rounds: Rounds,
    *,
    single_layer: Setting | None = None,
    failed: Mapping[Setting, str] | None = None,
) -> Confirmation:
    """Judge by the rounds; `failed`: who did not end them, and why."""
    failed = failed or {}
    others = [setting, *([] if single_layer is None else [single_layer])]
    shared = {
        contestant: [each for each in rounds if {contestant, DEFAULTS} <= each.keys()]
        for contestant in others
    }
    trials = {
        contestant: tuple(each[contestant] for each in shared[contestant]) for contestant in others
    }
    most = max(shared.values(), key=len)
    trials = {DEFAULTS: tuple(each[DEFAULTS] for each in most), **trials}

    def found(kept: Setting, reason: str) -> Confirmation:
        return Confirmation(
            winner=setting, single_layer=single_layer, trials=trials, kept=kept, reason=reason
        )

    if DEFAULTS in failed:
        return found(DEFAULTS, f"is not kept: the defaults {failed[DEFAULTS]}")
    verdicts = {
        contestant: (False, failed[contestant])
        if contestant in failed
        else _against_defaults(contestant, shared[contestant])
        for contestant in others
    }
    repeats, reason = verdicts[setting]
    if single_layer is None:
        return found(setting if repeats else DEFAULTS, reason)
    repeats_alone, reason_alone = verdicts[single_layer]
    if repeats and single_layer not in failed:
        gain = _median_s(trials[single_layer]) / _median_s(trials[setting])
        if gain > 1 or not repeats_alone:
            return found(setting, f"{reason}; {gain:.2f}x as fast as {in_words(single_layer)}")
        reason = f"was not faster: {1 / gain:.2f}x its time"
    if repeats_alone:
        return found(single_layer, f"{reason_alone}; {in_words(setting)} {reason}")
    if repeats:
        return found(setting, f"{reason}; {in_words(single_layer)} {reason_alone}")
    return found(DEFAULTS, f"{reason}; nor is {in_words(single_layer)} kept: it {reason_alone}")


def _against_defaults(setting: Setting, rounds: Rounds) -> tuple[bool, str]:
    """Whether it repeats in these rounds, and what is said of that."""
    defaults = [each[DEFAULTS].median_s for each in rounds]
    times = [each[setting].median_s for each in rounds]
    speedup = statistics.median(defaults) / statistics.median(times)
    wins = sum(theirs > ours for theirs, ours in zip(defaults, times, strict=True))
    how = f"in {wins} of {len(rounds)} rounds"
    if speedup >= 1 + LEAST_GAIN and wins >= LEAST_WINS:
        return True, f"{speedup:.2f}x as fast as the defaults, faster {how}"
    needed = f"needed: {LEAST_GAIN:.0%} in the median and {LEAST_WINS} rounds"
    return False, f"did not repeat: {speedup:.2f}x as fast, faster {how} ({needed})"


def _median_s(trials: Sequence[TuningTrial]) -> float:
    return statistics.median(trial.median_s for trial in trials)
