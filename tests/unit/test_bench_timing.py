"""The interleaved sampler, with a clock that only pretends."""

import pytest

from deepytorch_core.bench import timing


class OneRank:
    """An agreement of one: remembers what was asked."""

    def __init__(self):
        self.barriers = 0

    def barrier(self):
        self.barriers += 1

    def maximum(self, values):
        return list(values)


class Arms:
    """Two arms that take 10 us and 30 us per call by a clock of their own; notes who was called."""

    def __init__(self):
        self.called = []
        self.timed = []

    def calls(self):
        return (lambda: self._call("ours"), lambda: self._call("baseline"))

    def _call(self, name):
        self.called.append(name)
        return 10.0 if name == "ours" else 30.0

    def clock(self, call, repetitions):
        times = [call() for _ in range(repetitions)]
        self.timed.append((self.called[-1], repetitions))
        return times


def test_blocks_come_in_the_order_a_b_b_a():
    assert timing.block_order(4) == [0, 1, 1, 0, 0, 1, 1, 0]


def test_both_arms_are_sampled_in_turns():
    arms, ranks = Arms(), OneRank()
    blocks = timing.sample(arms.calls(), clock=arms.clock, ranks=ranks, iterations=3, budget_s=0)
    order = [name for name, _ in arms.timed[2:]]  # after one probe of each
    expected = ["ours" if arm == 0 else "baseline" for arm in timing.block_order(timing.MIN_PAIRS)]
    assert order == expected
    assert ranks.barriers == len(order)
    assert blocks == [[[10.0] * 3] * timing.MIN_PAIRS, [[30.0] * 3] * timing.MIN_PAIRS]


def test_each_block_starts_with_an_untimed_call():
    arms = Arms()
    timing.sample(arms.calls(), clock=arms.clock, ranks=OneRank(), iterations=5, budget_s=0)
    timed = sum(repetitions for _, repetitions in arms.timed)
    assert len(arms.called) == timed + 2 * timing.MIN_PAIRS


def test_the_slowest_rank_counts():
    class TwoRanks(OneRank):
        def maximum(self, values):
            return [value * 2 for value in values]

    arms = Arms()
    blocks = timing.sample(arms.calls(), clock=arms.clock, ranks=TwoRanks(), iterations=1)
    assert {value for block in blocks[timing.OURS] for value in block} == {20.0}


def test_the_plan_follows_the_time_of_one_call():
    fast = timing.plan([10.0, 100.0], iterations=0, budget_s=1.0)
    assert fast.repetitions == (50, 20)
    assert fast.num_pairs == timing.CALLS.max_pairs
    slow = timing.plan([50_000.0, 300_000.0], iterations=0, budget_s=1.0)
    assert slow == timing.Schedule(timing.MIN_PAIRS, (1, 1))
    assert timing.plan([10.0, 100.0], iterations=7, budget_s=1.0).repetitions == (7, 7)


def test_comparison():
    ours = [[10.0, 12.0, 11.0], [10.0, 10.0, 10.0]]
    baseline = [[22.0, 22.0, 99.0], [30.0, 30.0, 30.0]]
    result = timing.compare([ours, baseline])
    assert result.time_us == 10.0
    assert result.baseline_time_us == 30.0
    assert result.speedup == 2.5  # the median of 2.0 and 3.0
    assert result.spread == (2.25, 2.75)  # of the block ratios 2 and 3


def test_quartiles():
    assert timing.quartiles([5.0]) == (5.0, 5.0)
    assert timing.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_wall_clock_times_every_call():
    calls = []
    times = timing.wall_clock(lambda: calls.append(1), 4)
    assert len(times) == len(calls) == 4
    assert all(value >= 0 for value in times)


def test_spread_needs_blocks_of_both_arms():
    with pytest.raises(ValueError, match="zip"):
        timing.compare([[[1.0]], [[1.0], [2.0]]])
