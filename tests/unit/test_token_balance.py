"""Token balance in one process: stock's samples per step, exact tails, order, state, reports."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from deepytorch_core.base import decisions
from deepytorch_core.data import TokenBalancedBatchSampler, TokenCost
from deepytorch_core.data.partition import deal, even_groups, load_of


def long_tailed(number: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [min(1024, 1 + int(draw.lognormvariate(5.0, 0.9))) for _ in range(number)]


def balanced(lengths: list[int], *args: Any, **kwargs: Any) -> TokenBalancedBatchSampler:
    kwargs.setdefault("normalization", "global_tokens")
    return TokenBalancedBatchSampler(lengths, *args, **kwargs)


def samples_per_step(batches_of_ranks: list[list[list[int]]], accumulation: int) -> list[list[int]]:
    """Return what each optimizer step sees, over ranks and micro-batches, sorted."""
    (num_batches,) = {len(batches) for batches in batches_of_ranks}
    return [
        sorted(
            index
            for batches in batches_of_ranks
            for batch in batches[start : start + accumulation]
            for index in batch
        )
        for start in range(0, num_batches, accumulation)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_even_and_complete(seed: int) -> None:
    draw = random.Random(seed)
    num_groups = draw.randint(1, 9)
    costs = [
        float(draw.choice([0, 1, 7, 300, 1000])) for _ in range(num_groups + draw.randint(0, 40))
    ]
    groups = even_groups(costs, num_groups)
    assert sorted(position for group in groups for position in group) == list(range(len(costs)))
    assert all(groups)
    # Graham's bound for LPT, against the trivial lower bound of the optimum.
    heaviest = max(sum(costs[position] for position in group) for group in groups)
    assert heaviest <= sum(costs) / num_groups + max(costs)


def test_groups_beat_a_known_hard_case() -> None:
    """LPT alone gives 11 here; one swap finds the optimum."""
    costs = [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0]
    groups = even_groups(costs, 3)
    assert max(sum(costs[position] for position in group) for group in groups) <= 10


def test_too_few_samples_for_the_groups() -> None:
    with pytest.raises(ValueError, match="2 samples can't fill 3 groups"):
        even_groups([1.0, 2.0], 3)


def test_alike_groups_come_at_the_same_time() -> None:
    costs = [9.0, 8.0, 1.0, 2.0]
    arrangement = deal([[0], [1], [2], [3]], costs, 2)
    assert arrangement == [[[0], [2]], [[1], [3]]]
    load = load_of(arrangement, costs)
    assert (load.ranks, load.slots, load.group, load.mean) == (10.0, 11.0, 9.0, 10.0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampler_drops", [False, True])
@pytest.mark.parametrize(
    ("number", "ranks", "batch_size", "accumulation"),
    [(64, 2, 4, 2), (61, 2, 4, 2), (67, 3, 5, 1), (13, 4, 1, 3), (5, 4, 8, 2)],
)
def test_same_samples_per_step_as_a_distributed_sampler(
    number: int,
    ranks: int,
    batch_size: int,
    accumulation: int,
    sampler_drops: bool,
    drop_last: bool,
) -> None:
    lengths = long_tailed(number)
    stock, ours = [], []
    for rank in range(ranks):
        sampler = DistributedSampler(
            range(number), ranks, rank, shuffle=True, seed=3, drop_last=sampler_drops
        )
        stock_batches = BatchSampler(sampler, batch_size, drop_last)
        mine = balanced(lengths, sampler=stock_batches, accumulation=accumulation)
        for each in (sampler, mine):
            each.set_epoch(2)
        stock.append(list(stock_batches))
        ours.append(list(mine))
        assert len(mine) == len(ours[-1]) == len(stock[-1])
        assert all(ours[-1])
    assert samples_per_step(ours, accumulation) == samples_per_step(stock, accumulation)


def test_lengths_alone_follow_a_distributed_sampler() -> None:
    lengths = long_tailed(50)
    stock = [
        list(BatchSampler(DistributedSampler(range(50), 2, rank, seed=7), 4, False))
        for rank in range(2)
    ]
    ours = [list(balanced(lengths, 4, num_replicas=2, rank=rank, seed=7)) for rank in range(2)]
    assert samples_per_step(ours, 1) == samples_per_step(stock, 1)
    whole = list(balanced(lengths, 4, num_replicas=2, seed=7, even_batches=False))
    assert sorted(index for batch in whole for index in batch) == list(range(50))


def test_batches_are_more_even_and_never_less() -> None:
    lengths = long_tailed(512)
    for accumulation in (1, 4):
        for cost in (TokenCost(), TokenCost.of_decoder(64)):
            sampler = balanced(lengths, 4, num_replicas=4, accumulation=accumulation, cost=cost)
            found = sampler.imbalance()
            assert found.after < 1.0 + 0.5 * (found.before - 1.0), f"{cost} {found}"
        # One sample can outweigh all others of a step: nothing evens that out.
        cost = TokenCost(0.0, 1.0)
        found = balanced(
            lengths, 4, num_replicas=4, accumulation=accumulation, cost=cost
        ).imbalance()
        assert found.after <= found.before


def test_equal_lengths_keep_the_stock_batches() -> None:
    stock = BatchSampler(DistributedSampler(range(32), 2, 0, seed=1), 4, False)
    ours = balanced([100] * 32, sampler=stock, accumulation=2)
    assert [sorted(batch) for batch in ours] != []
    assert ours.imbalance().after == ours.imbalance().before == 1.0


def test_off_gives_exactly_the_stock_batches_and_says_why() -> None:
    lengths = long_tailed(61)
    for drop_last in (False, True):
        stock = BatchSampler(DistributedSampler(range(61), 2, 1, seed=1), 4, drop_last)
        off = balanced(lengths, sampler=stock, normalization="other")
        assert list(off) == list(stock)
        assert len(off) == len(stock)
        assert not off.is_balancing
        every = BatchSampler(SequentialSampler(range(61)), 4, drop_last)
        alone = balanced(lengths, sampler=every, normalization="other", num_replicas=2)
        assert list(alone) == list(every)
        assert alone.batch_size == 4
    assert decisions.made()[-1]["chosen"] == "off"
    assert "would change the gradient" in decisions.made()[-1]["reason"]


def test_off_with_a_rank_deals_out_as_accelerate_does() -> None:
    every = BatchSampler(SequentialSampler(range(16)), 4, False)
    off = balanced([1] * 16, sampler=every, normalization="other", num_replicas=2, rank=1)
    assert list(off) == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_one_rank_with_one_micro_batch_has_nothing_to_balance() -> None:
    sampler = balanced([3, 4, 5], 2, shuffle=False)
    assert not sampler.is_balancing
    assert list(sampler) == [[0, 1], [2]]
    assert "nothing to balance" in decisions.made()[-1]["reason"]


def test_the_report_has_the_imbalance_before_and_after() -> None:
    sampler = balanced(long_tailed(64), 4, num_replicas=2, rank=0)
    next(iter(sampler))
    (*_, made) = decisions.made()
    assert made["what"] == "token balance"
    assert made["chosen"] == "on"
    assert str(sampler.imbalance()) == made["reason"]


def test_epochs_differ_and_repeat() -> None:
    sampler = balanced(long_tailed(64), 4, num_replicas=2, rank=0)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.parametrize("normalization", ["global_tokens", "other"])
@pytest.mark.parametrize("with_generator", [False, True])
def test_an_epoch_resumes_where_it_stood(normalization: Any, with_generator: bool) -> None:
    lengths = long_tailed(70)

    def build(seed: int) -> TokenBalancedBatchSampler:
        sampler = None
        if with_generator:
            sampler = RandomSampler(range(70), generator=torch.Generator().manual_seed(seed))
        return balanced(
            lengths,
            4,
            sampler=sampler,
            num_replicas=2,
            rank=1,
            accumulation=3,
            normalization=normalization,
        )

    sampler = build(0)
    sampler.set_epoch(3)
    whole = list(sampler) if not with_generator else None
    batches = iter(sampler)
    taken = [next(batches) for _ in range(5)]
    state = sampler.state_dict()
    rest = list(batches)
    again = build(99)
    again.load_state_dict(state)
    assert list(again) == rest
    assert again.state_dict()["batches"] == sampler.state_dict()["batches"] > 5
    if whole is not None:
        assert taken + rest == whole
        assert list(again) == whole, "the next iteration is a whole epoch"
    ahead = build(99)
    ahead.load_state_dict({**state, "batches": 4})
    assert list(ahead) == [taken[4], *rest]


@pytest.mark.parametrize("sets_epoch", [False, True])
@pytest.mark.parametrize("normalization", ["global_tokens", "other"])
@pytest.mark.parametrize("with_generator", [False, True])
@pytest.mark.parametrize("taken", ["at the last batch", "after it", "after it, with a number"])
def test_a_finished_epoch_does_not_come_again(
    taken: str, with_generator: bool, normalization: Any, sets_epoch: bool
) -> None:
    def build(seed: int) -> TokenBalancedBatchSampler:
        generator = torch.Generator().manual_seed(seed)
        return balanced(
            long_tailed(70),
            4,
            sampler=RandomSampler(range(70), generator=generator) if with_generator else None,
            num_replicas=2,
            rank=0,
            normalization=normalization,
        )

    def epochs(sampler: TokenBalancedBatchSampler) -> list[list[list[int]]]:
        found = []
        for epoch in (1, 2):
            if sets_epoch:
                sampler.set_epoch(epoch)
            found.append(list(sampler))
        return found

    unbroken, resumed = build(0), build(99)
    for _ in unbroken:
        state = unbroken.state_dict()
    if taken != "at the last batch":
        number = len(unbroken) if "number" in taken else None
        state = unbroken.state_dict(batches=number)
    resumed.load_state_dict(state)
    if not sets_epoch:
        assert list(resumed) == []
    assert epochs(resumed) == epochs(unbroken)


def test_a_state_from_before_an_epoch_has_its_generator() -> None:
    def build(seed: int) -> TokenBalancedBatchSampler:
        order = RandomSampler(range(70), generator=torch.Generator().manual_seed(seed))
        return balanced(long_tailed(70), 4, sampler=order, num_replicas=2, rank=0)

    unbroken = build(0)
    for epoch in range(3):
        unbroken.set_epoch(epoch)
        resumed = build(99)
        resumed.load_state_dict(unbroken.state_dict())
        assert list(resumed) == list(unbroken)


@pytest.mark.parametrize("whose", ["ours", "the sampler's alone"])
def test_a_state_is_not_gone_on_with_in_an_earlier_epoch(whose: str) -> None:
    """A loader that Accelerate made sets the epoch at every iteration, and begins at 0."""

    def build() -> TokenBalancedBatchSampler:
        return balanced(long_tailed(70), 4, num_replicas=2, rank=0)

    unbroken, resumed = build(), build()
    unbroken.set_epoch(2)
    batches = iter(unbroken)
    next(batches)
    resumed.load_state_dict(unbroken.state_dict())
    setter: Any = resumed if whose == "ours" else resumed.sampler
    setter.set_epoch(0)
    with pytest.raises(ValueError, match=r"of epoch 2 .* begins epoch 0: call set_epoch\(2\)"):
        next(iter(resumed))
    setter.set_epoch(2)
    assert list(resumed) == list(batches)


def test_a_state_of_other_sizes_is_refused() -> None:
    state = balanced([1, 2, 3, 4], 2, num_replicas=2, rank=0).state_dict()
    other = balanced([1, 2, 3, 4], 1, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="other batch_size"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("normalization='mean'", {"batch_size": 2, "normalization": "mean"}),
        ("batch_size=None", {}),
        ("batch_size=0", {"batch_size": 0}),
        ("accumulation=0", {"batch_size": 2, "accumulation": 0}),
        ("rank=2 is not one of 2 ranks", {"batch_size": 2, "num_replicas": 2, "rank": 2}),
        (
            "batch_size=2 beside a batch sampler",
            {"batch_size": 2, "sampler": BatchSampler(range(4), 2, False)},
        ),
        (
            "num_replicas=3, but the sampler's is 2",
            {"batch_size": 2, "num_replicas": 3, "sampler": DistributedSampler(range(4), 2, 0)},
        ),
        (
            "another order on every rank",
            {"batch_size": 2, "num_replicas": 2, "rank": 0, "sampler": RandomSampler(range(4))},
        ),
    ],
)
def test_arguments_that_make_no_sense(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        balanced([1, 2, 3, 4], **arguments)


def test_a_length_that_is_missing() -> None:
    sampler = balanced([1, 2], 2, sampler=SequentialSampler(range(4)), num_replicas=2)
    with pytest.raises(ValueError, match="index 3 and `lengths` has 2 entries"):
        list(sampler)


def test_a_cost_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="neither may be negative"):
        TokenCost(-1.0)


def test_it_serves_a_data_loader_with_workers() -> None:
    sampler = balanced(torch.tensor(long_tailed(20)), 2, num_replicas=2, rank=0)
    loader = DataLoader(range(20), batch_sampler=sampler, num_workers=1)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == list(sampler)


def test_an_iteration_that_is_left_early_is_not_gone_on_with() -> None:
    lengths = [(7 * number) % 13 + 1 for number in range(32)]
    sampler = TokenBalancedBatchSampler(
        lengths, 4, normalization="global_tokens", num_replicas=2, rank=0
    )
    whole = list(sampler)
    next(iter(sampler))
    assert list(sampler) == whole
    for _ in zip(range(len(sampler)), sampler, strict=False):
        pass  # as many as there are: nobody hears that it was the last
    assert list(sampler) == whole
    sampler.load_state_dict({**sampler.state_dict(), "batches": 2})
    assert list(sampler) == whole[2:]
    assert list(sampler) == whole
    sampler.load_state_dict({**sampler.state_dict(), "batches": 2})
    sampler.set_epoch(sampler.epoch + 1)
    assert len(list(sampler)) == len(whole)
