"""Steps of different lengths are compared as if they had been of one."""

from __future__ import annotations

import math
import random

import pytest
from torch import nn

from deepytorch_core.compile import regions, turns

TOKENS = [620, 910, 480, 700, 1020, 450, 560, 870, 510, 860, 470, 690, 1010, 450, 560, 880]


def _steps(
    fixed_s: float, token_s: float, gain: float, *, seed: int = 0
) -> tuple[list[turns.Step], list[turns.Step]]:
    """Those of both ways as `deepytorch.compile` takes turns over batches that come again."""
    noise = random.Random(seed)
    ways: dict[bool, list[turns.Step]] = {False: [], True: []}
    for number in range(turns.MOST_STEPS):
        if not turns.is_counted(number):
            continue
        is_candidate = turns.is_candidates(number)
        tokens = TOKENS[number % len(TOKENS)]
        seconds = (fixed_s + token_s * tokens) * (1 - gain * is_candidate)
        ways[is_candidate].append((seconds * noise.uniform(0.995, 1.005), tokens))
    return ways[False], ways[True]


@pytest.mark.parametrize("gain", [0.05, 0.3])
@pytest.mark.parametrize(
    ("fixed_s", "token_s"), [(0.4, 0.1e-3), (0.2, 0.4e-3), (0.0, 1e-3), (0.5, 0.0)]
)
def test_a_gain_shows_whatever_a_token_takes(fixed_s: float, token_s: float, gain: float) -> None:
    for seed in range(5):
        standing, candidate = turns.of_typical_steps(*_steps(fixed_s, token_s, gain, seed=seed))
        assert turns.is_faster(candidate, standing)
        standing, candidate = turns.of_typical_steps(*_steps(fixed_s, token_s, 0.0, seed=seed))
        assert not turns.is_faster(candidate, standing)
        assert not turns.is_faster(standing, candidate)


def _blocks(took_s: float, *, noise: float, rounds: int, seed: int) -> list[float]:
    numbers = random.Random(seed)
    return [
        took_s * numbers.gauss(1.0, noise) for _ in range(rounds) for _ in range(turns.BLOCK - 1)
    ]


@pytest.mark.parametrize(
    ("gain", "noise", "expected"),
    [
        (0.0, 0.001, 1.0),
        (0.005, 0.001, 1.0),
        (-0.005, 0.001, 1.0),
        # A way that may gain or lose enough is measured on, as is one that noise hides.
        (0.02, 0.001, 0.0),
        (-0.02, 0.001, 0.0),
        (0.03, 0.01, 0.0),
        (0.0, 0.03, 0.0),
    ],
)
def test_ways_are_alike_where_more_steps_would_not_tell_them_apart(
    gain: float, noise: float, expected: float
) -> None:
    found = [
        turns.are_alike(
            _blocks(1 - gain, noise=noise, rounds=turns.LOOKS[0], seed=seed),
            _blocks(1.0, noise=noise, rounds=turns.LOOKS[0], seed=~seed),
        )
        for seed in range(300)
    ]
    assert sum(found) / len(found) == pytest.approx(expected, abs=0.03)


def test_ways_that_were_not_timed_are_not_alike() -> None:
    never = [math.inf] * 6
    assert not turns.are_alike(never, never)
    assert not turns.are_alike(never, [1.0] * 6)
    assert not turns.are_alike([1.0] * 6, never)


def test_the_times_are_those_of_a_typical_step() -> None:
    standing, candidate = turns.of_typical_steps(*_steps(0.4, 0.2e-3, 0.1))
    typical = 0.4 + 0.2e-3 * 655
    assert standing == pytest.approx([typical] * len(standing), rel=0.05)
    assert candidate == pytest.approx([0.9 * typical] * len(candidate), rel=0.05)


def test_steps_that_were_held_up_move_nothing_else() -> None:
    standing, candidate = _steps(0.4, 0.2e-3, 0.1)
    standing[2] = (math.inf, standing[2][1])
    candidate[5] = (9.0, candidate[5][1])
    evened = turns.of_typical_steps(standing, candidate)
    assert evened[0][2] == math.inf
    assert evened[1][5] > 8
    assert turns.is_faster(evened[1], evened[0])


@pytest.mark.parametrize(
    ("standing", "candidate"),
    [
        ([(0.5, 100.0)] * 3, [(0.4, 100.0)] * 3),
        ([(math.inf, 100.0), (math.inf, 300.0)], [(math.inf, 200.0)]),
        ([(0.5, 300.0), (0.6, 100.0)], [(0.5, 300.0), (0.6, 100.0)]),
    ],
    ids=["of one length", "nothing was timed", "less for more tokens"],
)
def test_without_a_slope_times_stay_what_they_are(
    standing: list[turns.Step], candidate: list[turns.Step]
) -> None:
    evened = turns.of_typical_steps(standing, candidate)
    assert evened == ([step[0] for step in standing], [step[0] for step in candidate])


def test_only_a_wrappers_process_group_is_one() -> None:
    class Named(nn.Module):
        process_group = "of people"

    assert regions.process_group(Named()) is None
    assert regions.process_group(nn.Linear(1, 1)) is None


def test_the_slowest_ranks_time_and_the_most_tokens_count() -> None:
    """The other rank had twice the tokens, and took a tenth longer."""
    samples = turns.Samples()
    for seconds, tokens in ((0.5, 10), (0.7, 20)):
        samples.add(False, seconds, tokens)
        samples.add(True, seconds - 0.1, tokens)
    factors = {"seconds": 1.1, "tokens": 2.0}
    others = {
        name: [factors[name.split()[0]] * value for value in each]
        for name, each in samples.rows().items()
    }
    standing, candidate = samples.merged([samples.rows(), others])
    assert standing == pytest.approx([0.66, 0.66])
    assert candidate == pytest.approx([0.55, 0.55])
