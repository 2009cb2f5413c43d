"""The search of `deepytorch tune` on synthetic jobs, and the confirmation of what it found."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Mapping

import pytest

from deepytorch_core.tune import confirm, knobs
from deepytorch_core.tune.knobs import DEFAULTS, Knob, Setting
from deepytorch_core.tune.search import Search, TuningTrial

STEPS = 6
KNOBS = (
    Knob(name="ddp_bucket_mb", layer=knobs.FRAMEWORK, values=(4, 64), least=1, most=1024),
    Knob(name="chunk_bytes", layer=knobs.PLAN, values=(16384, 65536), least=64, most=1 << 18),
    Knob(name="num_sockets", layer=knobs.TRANSPORT, values=(4, 8), least=1, most=64),
)
Seconds = Callable[[Mapping[str, int]], float]


class Machine:
    """Jobs whose step takes `seconds`, and up to `noise` of it more or less."""

    def __init__(self, seconds: Seconds, *, noise: float = 0.0, seed: int = 0) -> None:
        self.seconds = seconds
        self.noise = noise
        self.random = random.Random(seed)
        self.steps = 0
        self.problems: dict[Setting, str] = {}

    def measure(self, setting: Setting, best: TuningTrial | None) -> TuningTrial:
        middle = self.seconds(dict(setting))
        spread = [1 + self.noise * self.random.uniform(-1, 1) for _ in range(STEPS)]
        self.steps += STEPS
        return TuningTrial(
            setting=setting,
            step_s=tuple(middle * factor for factor in spread),
            steps=STEPS,
            problem=self.problems.get(setting, ""),
        )

    def search(self, budget_steps: int) -> Search:
        found = Search(KNOBS, self.measure, steps=STEPS, budget_steps=budget_steps)
        found.run()
        assert self.steps <= budget_steps
        return found


def setting(**values: int) -> Setting:
    return frozenset(values.items())


def pays_beside_another(values: Mapping[str, int]) -> float:
    """Small buckets cost latency, unless several sockets hide it: one pass misses the best."""
    has_sockets, is_small = values.get("num_sockets") == 4, values.get("ddp_bucket_mb") == 4
    return {(False, False): 1.0, (False, True): 1.2, (True, False): 0.9, (True, True): 0.6}[
        has_sockets, is_small
    ]


def pays_only_together(values: Mapping[str, int]) -> float:
    """Neither pays alone, so no change of one setting leads to the best."""
    has_sockets, is_small = values.get("num_sockets") == 4, values.get("ddp_bucket_mb") == 4
    penalty = 0.02 * (values.get("chunk_bytes") is not None)
    if has_sockets and is_small:
        return 0.6 + penalty
    return 1.0 + 0.05 * has_sockets + 0.05 * is_small + penalty


@pytest.mark.parametrize("seconds", [pays_beside_another, pays_only_together])
@pytest.mark.parametrize("seed", range(20))
def test_an_interaction_is_found_in_noise(seconds: Seconds, seed: int) -> None:
    machine = Machine(seconds, noise=0.03, seed=seed)
    best = machine.search(budget_steps=27 * STEPS).best
    assert best is not None
    assert best.setting >= setting(ddp_bucket_mb=4, num_sockets=4)


def test_one_pass_over_the_settings_misses_it() -> None:
    """Show what the search is better than."""
    machine = Machine(pays_beside_another)
    search = machine.search(budget_steps=7 * STEPS)
    assert search.best is not None
    assert search.best.setting == setting(num_sockets=4)


@pytest.mark.parametrize("least_at", [1, 2, 8, 16, 32])
def test_a_degree_is_refined_from_the_value_that_was_found(least_at: int) -> None:
    """Neither 4 nor 64 is best, but one of them is better than the default."""
    graded = dataclasses.replace(KNOBS[0], is_graded=True)

    def seconds(values: Mapping[str, int]) -> float:
        return 1 + abs(
            math.log2(values.get("ddp_bucket_mb", 25) * 1000) - math.log2(1000 * least_at)
        )

    machine = Machine(lambda values: 10.0 if not values else seconds(values))
    search = Search((graded,), machine.measure, steps=STEPS, budget_steps=1000)
    assert search.run().setting == setting(ddp_bucket_mb=least_at)
    tried = {dict(trial.setting).get("ddp_bucket_mb", 0) for trial in search.trials}
    assert max(tried) == 64
    assert len(tried) <= 1 + 2 + 5


@pytest.mark.parametrize("budget", [1, 5, 6, 11, 12, 100, 161])
def test_the_budget_is_kept(budget: int) -> None:
    machine = Machine(lambda values: 1.0, noise=0.2)
    search = Search(KNOBS, machine.measure, steps=STEPS, budget_steps=budget)
    search.run()
    assert machine.steps <= max(budget, STEPS)
    assert len({trial.setting for trial in search.trials}) == len(search.trials)


def test_steps_saved_by_an_early_end_are_spent_on_others() -> None:
    def measure(tried: Setting, best: TuningTrial | None) -> TuningTrial:
        is_slow = bool(tried)
        steps = 2 if is_slow else STEPS
        return TuningTrial(
            setting=tried, step_s=(1.0 + is_slow,) * steps, steps=steps, is_whole=not is_slow
        )

    search = Search(KNOBS, measure, steps=STEPS, budget_steps=3 * STEPS)
    search.run()
    assert len(search.trials) == 1 + 4  # 6 + 4 * 2, and less than 6 are left
    assert search.best is search.trials[0]


def test_a_lucky_first_run_of_the_defaults_hides_nothing() -> None:
    machine = Machine(lambda values: 0.95 if "num_sockets" in values else 1.0)
    search = Search(KNOBS, machine.measure, steps=STEPS, budget_steps=8 * STEPS)
    search.start_from(trial(DEFAULTS, 0.9))
    assert search.run().setting == DEFAULTS
    assert search.contender(trial(DEFAULTS, 0.9)).setting == DEFAULTS
    assert search.contender(trial(DEFAULTS, 1.1)).setting == setting(num_sockets=4)
    # One that failed or was ended early is none.
    slow = Machine(lambda values: 1.0)
    slow.problems = {setting(num_sockets=4): "failed"}
    search = slow.search(budget_steps=8 * STEPS)
    assert search.contender(trial(DEFAULTS, 1.0)).setting == DEFAULTS


def test_a_search_ends_when_nothing_is_left() -> None:
    search = Machine(lambda values: 1.0).search(budget_steps=10_000)
    alone, pairs = 3 * 2, 3 * 2 * 2
    assert len(search.trials) == 1 + alone + pairs


def test_what_fails_is_no_winner_and_is_not_combined() -> None:
    machine = Machine(lambda values: 1.0 - 0.2 * len(values))
    for size in (4, 64):
        machine.problems[setting(ddp_bucket_mb=size)] = "failed: out of memory"
    search = machine.search(budget_steps=10_000)
    assert search.best is not None
    assert search.best.setting == setting(chunk_bytes=16384, num_sockets=4)
    failed = [trial for trial in search.trials if trial.problem]
    assert {trial.setting for trial in failed} == set(machine.problems)
    assert all(trial.median_s == math.inf for trial in failed)


@pytest.mark.parametrize("seed", range(40))
def test_a_winner_that_is_slower_is_never_kept(seed: int) -> None:
    """Every setting is slower than the defaults by 1 to 10%; noise of 10% hides it."""
    chosen = random.Random(seed)
    slowdown: dict[frozenset[tuple[str, int]], float] = {}

    def seconds(values: Mapping[str, int]) -> float:
        if not values:
            return 1.0
        return slowdown.setdefault(frozenset(values.items()), 1 + chosen.uniform(0.01, 0.1))

    machine = Machine(seconds, noise=0.1, seed=seed)
    best = Search(KNOBS, machine.measure, steps=STEPS, budget_steps=100).run()
    repeated = confirm.confirm(best.setting, lambda tried: machine.measure(tried, None))
    if best.setting != DEFAULTS:
        assert repeated.kept == DEFAULTS
        assert "did not repeat" in repeated.reason


def trial(tried: Setting, seconds: float, problem: str = "") -> TuningTrial:
    return TuningTrial(setting=tried, step_s=(seconds,) * STEPS, steps=STEPS, problem=problem)


@pytest.mark.parametrize(
    ("defaults", "winner", "is_kept"),
    [
        ((1.0, 1.0, 1.0), (0.9, 0.9, 0.9), True),
        ((1.0, 1.0, 1.0), (0.9, 0.9, 1.2), True),  # two of three
        ((1.0, 1.0, 1.0), (0.5, 1.1, 1.1), False),  # one of three
        ((1.0, 1.0, 1.0), (0.98, 0.98, 0.98), False),  # too little
        ((1.0, 2.0, 1.0), (1.0, 1.0, 1.0), False),  # an outlier is no gain
    ],
)
def test_a_winner_stays_if_it_repeats(
    defaults: tuple[float, ...], winner: tuple[float, ...], is_kept: bool
) -> None:
    wanted = setting(num_sockets=4)
    times = {DEFAULTS: iter(defaults), wanted: iter(winner)}
    order: list[Setting] = []

    def measure(tried: Setting) -> TuningTrial:
        order.append(tried)
        return trial(tried, next(times[tried]))

    found = confirm.confirm(wanted, measure)
    assert found.kept == (wanted if is_kept else DEFAULTS)
    assert order == [DEFAULTS, wanted, wanted, DEFAULTS, DEFAULTS, wanted]
    assert {tried: len(trials) for tried, trials in found.trials.items()} == {
        DEFAULTS: 3,
        wanted: 3,
    }


def test_a_winner_that_fails_when_repeated_is_named() -> None:
    wanted = setting(num_sockets=4)
    trials = iter([trial(DEFAULTS, 1.0), trial(wanted, 0.5), trial(wanted, 0.5, "another loss: x")])
    found = confirm.confirm(wanted, lambda tried: next(trials))
    assert found.kept == DEFAULTS
    assert found.reason == "failed when repeated: another loss: x"
    assert found.times_ms == {"defaults": 1000.0, "tuned": 500.0}


JOINT = setting(ddp_bucket_mb=4, num_sockets=4)
ALONE = setting(num_sockets=4)


def repeated(
    joint: Iterable[float], alone: Iterable[float], defaults: Iterable[float] = (1.0,) * 3
) -> tuple[confirm.Confirmation, list[Setting]]:
    """Rounds of three, and in which order; a time of 0 is a job that fails."""
    times = {DEFAULTS: iter(defaults), JOINT: iter(joint), ALONE: iter(alone)}
    order: list[Setting] = []

    def measure(tried: Setting) -> TuningTrial:
        order.append(tried)
        seconds = next(times[tried])
        return trial(tried, seconds, "" if seconds else "failed: out of memory")

    return confirm.confirm(JOINT, measure, ALONE), order


def test_the_best_of_one_layer_takes_its_turns_with_the_winner() -> None:
    found, order = repeated((0.8, 0.8, 0.8), (0.9, 0.9, 0.9))
    one_round = [DEFAULTS, JOINT, ALONE]
    assert order == [*one_round, *one_round[1:], DEFAULTS, ALONE, DEFAULTS, JOINT]
    assert found.kept == found.fastest == JOINT
    assert found.reason == (
        "1.25x as fast as the defaults, faster in 3 of 3 rounds; 1.12x as fast as num_sockets=4"
    )
    assert found.times_ms == pytest.approx({"defaults": 1000.0, "tuned": 800.0})
    medians = {DEFAULTS: 1000.0, JOINT: 800.0, ALONE: 900.0}
    assert found.medians_ms == pytest.approx(medians)


@pytest.mark.parametrize(
    ("joint", "alone", "kept"),
    [
        ((0.8, 0.7, 0.9), (0.8, 0.9, 0.9), JOINT),  # in the median
        ((0.8, 0.8, 0.8), (0.8, 0.8, 0.8), ALONE),  # no faster: the simpler one
        ((0.8, 0.8, 0.8), (0.7, 0.7, 0.9), ALONE),
        ((0.99, 0.99, 0.99), (0.9, 0.9, 0.9), ALONE),  # the winner of the search did not repeat
        ((0.8, 0.8, 0.8), (0.99, 0.99, 0.99), JOINT),
        ((0.99, 0.99, 0.99), (0.98, 0.98, 0.98), DEFAULTS),
        ((0.99, 0.99, 0.99), (1.1, 1.1, 1.1), DEFAULTS),
        ((0.8, 0.0), (0.9, 0.9, 0.9), ALONE),  # who fails takes part no more
        ((0.8, 0.8, 0.8), (0.0,), JOINT),
        ((0.8, 0.0), (0.9, 0.9, 0.0), DEFAULTS),
        ((0.0,), (0.0,), DEFAULTS),
    ],
)
def test_several_layers_stay_if_they_beat_one(
    joint: tuple[float, ...], alone: tuple[float, ...], kept: Setting
) -> None:
    found, order = repeated(joint, alone)
    assert found.kept == kept
    assert len(order) <= 3 * confirm.ROUNDS
    assert order.count(JOINT) == len(joint)
    assert order.count(ALONE) == len(alone)
    for tried, times in ((JOINT, joint), (ALONE, alone)):
        if 0.0 in times:
            assert knobs.in_words(tried) in found.reason or tried == JOINT
            assert "failed when repeated: failed: out of memory" in found.reason
    if kept != DEFAULTS:
        expected = 1e3 * sorted(joint if kept == JOINT else alone)[1]
        assert found.times_ms["tuned"] == pytest.approx(expected)


def test_without_the_defaults_nothing_is_confirmed() -> None:
    found, order = repeated((0.8, 0.8), (0.9, 0.9), defaults=(1.0, 0.0))
    assert found.kept == DEFAULTS
    assert order == [DEFAULTS, JOINT, ALONE, JOINT, ALONE, DEFAULTS]
    assert found.reason == ("is not kept: the defaults failed when repeated: failed: out of memory")


def test_the_best_of_one_layer_is_the_fastest_whole_trial_of_one() -> None:
    times = {
        setting(ddp_bucket_mb=4): 0.95,
        setting(num_sockets=4): 0.9,
        setting(num_sockets=8): 0.7,
        JOINT: 0.6,
    }
    machine = Machine(lambda values: times.get(frozenset(values.items()), 1.0))
    machine.problems = {setting(num_sockets=8): "another loss"}
    search = machine.search(budget_steps=20 * STEPS)
    best = search.contender(trial(DEFAULTS, 1.0))
    alone = search.best_of_one_layer()
    assert best.setting == JOINT
    assert alone is not None
    assert alone.setting == ALONE
    # With noise, what seemed to pay together may not: a third job a round tells.
    found = confirm.confirm(
        best.setting,
        lambda tried: trial(tried, {JOINT: 0.92}.get(tried, times.get(tried, 1.0))),
        ALONE,
    )
    assert found.kept == ALONE
    only_defaults = Machine(lambda values: 1.0).search(budget_steps=STEPS)
    assert only_defaults.best_of_one_layer() is None
