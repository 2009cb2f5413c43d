"""The winner of a search against the defaults, in fresh jobs that take turns.

The best of many noisy measurements looks better than it is. So it counts only if it repeats: in
rounds of one job each, in alternating order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepytorch_core.tune.knobs import DEFAULTS, Setting
from deepytorch_core.tune.search import Trial

ROUNDS = 3
LEAST_WINS = 2
LEAST_GAIN = 0.03
"""How much faster a step must be in the median, as a share of the winner's time."""


@dataclass(frozen=True)
class Confirmation:
    """The rounds' jobs, and whether the winner is to stay; `reason` says why or why not."""

    defaults: tuple[Trial, ...]
    winner: tuple[Trial, ...]
    is_kept: bool
    reason: str
    times_ms: dict[str, float] = field(default_factory=dict)


def confirm(setting: Setting, measure: Callable[[Setting], Trial]) -> Confirmation:
    """Run `setting` and the defaults in turns, and judge; ends at the first job that fails."""
    pairs: list[dict[Setting, Trial]] = []
    for number in range(ROUNDS):
        order = (DEFAULTS, setting) if number % 2 == 0 else (setting, DEFAULTS)
        pairs.append({})
        for one in order:
            trial = pairs[-1][one] = measure(one)
            if trial.problem:
                whole = [pair for pair in pairs if len(pair) == len(order)]
                who = "the defaults" if one == DEFAULTS else "it"
                reason = f"{who} failed when repeated: {trial.problem}"
                return _confirmation(setting, whole, is_kept=False, reason=reason)
    return judge(setting, pairs)


def judge(setting: Setting, pairs: Sequence[dict[Setting, Trial]]) -> Confirmation:
    """What whole rounds say."""
    defaults = [pair[DEFAULTS].median_s for pair in pairs]
    winner = [pair[setting].median_s for pair in pairs]
    speedup = statistics.median(defaults) / statistics.median(winner)
    wins = sum(theirs > ours for theirs, ours in zip(defaults, winner, strict=True))
    how = f"in {wins} of {len(pairs)} rounds"
    if speedup >= 1 + LEAST_GAIN and wins >= LEAST_WINS:
        reason = f"{speedup:.2f}x as fast as the defaults, faster {how}"
        return _confirmation(setting, pairs, is_kept=True, reason=reason)
    needed = f"needed: {LEAST_GAIN:.0%} in the median and {LEAST_WINS} rounds"
    reason = f"did not repeat: {speedup:.2f}x as fast, faster {how} ({needed})"
    return _confirmation(setting, pairs, is_kept=False, reason=reason)


def _confirmation(
    setting: Setting, pairs: Sequence[dict[Setting, Trial]], *, is_kept: bool, reason: str
) -> Confirmation:
    defaults = tuple(pair[DEFAULTS] for pair in pairs)
    winner = tuple(pair[setting] for pair in pairs)
    times = {}
    if pairs:
        times = {
            "defaults": 1e3 * statistics.median(trial.median_s for trial in defaults),
            "tuned": 1e3 * statistics.median(trial.median_s for trial in winner),
        }
    return Confirmation(defaults, winner, is_kept, reason, times)
