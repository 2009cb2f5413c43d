"""Tests that measure what DeepSpeed's configuration leaves open: bucket sizes, gradients' way."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch.integrations.deepspeed import buckets
from deepytorch_core.base import config
from deepytorch_core.testing import spawn_ranks


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({10: 1.0, 20: 1.0, 30: 1.0}, 10),
        ({10: 2.0, 20: 1.05, 30: 1.0}, 20),
        ({10: 2.0, 20: 1.5, 30: 1.0}, 30),
        ({10: 1.0, 20: 2.0}, 10),
    ],
)
def test_the_smallest_of_the_good_sizes_is_chosen(times: dict[int, float], chosen: int) -> None:
    assert buckets.smallest_good(times) == chosen


def test_a_second_bucket_for_a_few_elements_is_not_worth_its_own_cost() -> None:
    total = (1 << 22) + 1000
    # As fast for each element with both sizes; only what DeepSpeed does for a bucket differs.
    sizes = {1 << 22: 80e-6, 1 << 24: 80e-6}
    times = {size: buckets.step_s(total, size, call) for size, call in sizes.items()}
    assert buckets.smallest_good(times) == 1 << 24


def test_what_a_larger_call_takes_goes_on_like_the_largest_two() -> None:
    further = buckets.further
    assert further({10: 9.0, 100: 2.0, 200: 3.0}, 400) == pytest.approx(5.0)
    assert further({100: 3.0, 200: 2.0}, 400) == pytest.approx(2.0)  # noise: no faster than seen


def sizes_of_a_model(total: int, call_us: float) -> list[list[int]]:
    """[chosen, beside the backward pass], if that waits and if not; 2**26 take `call_us`."""
    kind = torch.float32, torch.device("cpu")

    def took(elements: int, device: torch.device) -> tuple[float, float]:
        return elements / (1 << 26) * call_us * 1e-6, 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_call", lambda _, elements, kind: elements)
        patch.setattr(buckets, "_measure", took)
        found = [buckets._choose("all_reduce", total, kind, waits=waits) for waits in (True, False)]
    return [[choice.elements, choice.beside] for choice in found]


@pytest.mark.parametrize(
    ("total", "call_us", "waiting", "beside"),
    [
        # Stock has one bucket: a second one, for want of some thousands, would cost as much again.
        ((1 << 26) + 8832, 1000.0, (1 << 26) + 8832, 1 << 26),
        (13 * 10**9, 1000.0, buckets.DEFAULT, 1 << 26),
        # A link so slow that a bucket's own cost is lost in it: small ones take less memory.
        (13 * 10**9, 60_000.0, 1 << 24, 1 << 24),
        (50_000_000, 1000.0, 1 << 26, 1 << 26),
    ],
)
def test_stocks_size_is_a_candidate_where_the_backward_pass_waits(
    total: int, call_us: float, waiting: int, beside: int
) -> None:
    assert sizes_of_a_model(total, call_us) == [[waiting, beside], [beside, beside]]


def sizes_after_slow_starts(rank: int, world_size: int) -> str:
    """The reason of a choice where a collective's first call takes longer than is measured."""
    buckets.CANDIDATES = (1 << 8, 1 << 10, 1 << 12)
    buckets._LIMIT_S = 0.3
    made = buckets._call

    def slow_at_first(*args: Any) -> Callable[[], object]:
        call, calls = made(*args), itertools.count()

        def first_slowly() -> object:
            time.sleep(0.5 if next(calls) == 0 else 0)
            return call()

        return first_slowly

    buckets._call = slow_at_first
    kind = torch.float32, torch.device("cpu")
    return buckets._choose("all_reduce", 1 << 14, kind).reason


def test_what_a_first_call_sets_up_does_not_end_the_search() -> None:
    reason, _ = spawn_ranks(sizes_after_slow_starts, 2, backend="deepytorch", fresh=True)
    assert all(f"with {size}" in reason for size in (1 << 8, 1 << 10, 1 << 12))


def ways_of_gradients(rank: int, world_size: int) -> list[Any]:
    """`use_multi_rank_bucket_allreduce`, open or not, with one of the collectives made slow."""
    key, parts = "use_multi_rank_bucket_allreduce", (dist.reduce, dist.all_reduce)
    model = torch.nn.Linear(64, 100)

    def slow(call: Any) -> Any:
        def slowed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.02)
            return call(*args, **kwargs)

        return slowed

    seen: list[Any] = []
    for stage, given, (reduce, all_reduce) in (
        (2, {}, (slow(parts[0]), parts[1])),
        (2, {}, (parts[0], slow(parts[1]))),
        (1, {}, (parts[0], slow(parts[1]))),
        (2, {key: True}, (parts[0], slow(parts[1]))),
        (2, {"reduce_scatter": False}, (parts[0], slow(parts[1]))),
        (3, {}, (parts[0], slow(parts[1]))),
        (2, {"reduce_bucket_size": "many"}, (parts[0], slow(parts[1]))),
        (2, {"reduce_bucket_size": 4e3}, (parts[0], slow(parts[1]))),
    ):
        zero = {"stage": stage, "reduce_bucket_size": 4096, **given}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "reduce", reduce)
            patch.setattr(dist, "all_reduce", all_reduce)
            filled = buckets.fill_bucket_sizes(
                {"zero_optimization": zero}, model, config.current(), torch.device("cpu")
            )
        seen.append(filled["zero_optimization"].get(key))
    return seen


def test_gradients_go_to_their_owners_where_that_is_faster() -> None:
    tune = {"DEEPYTORCH_TUNE": "auto"}
    seen = spawn_ranks(ways_of_gradients, 2, backend="deepytorch", env=tune, fresh=True)
    assert seen == [[True, False, False, True, None, None, None, False]] * 2


@pytest.mark.parametrize(
    ("zero", "device", "is_open"),
    [
        ({"stage": 2}, "cuda", True),
        ({"stage": 2, "overlap_comm": None}, "cuda", True),
        ({"stage": 2}, "cpu", False),
        ({"stage": 1}, "cuda", False),
        ({"stage": 3}, "cuda", False),
        ({"stage": 2, "overlap_comm": False}, "cuda", False),
        ({"stage": 2, "reduce_scatter": False}, "cuda", False),
        ({"stage": 2, "contiguous_gradients": False}, "cuda", False),
        ({"stage": 2, "use_multi_rank_bucket_allreduce": False}, "cuda", False),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "cuda", False),
    ],
    ids=str,
)
def test_an_overlap_is_tried_where_nothing_speaks_against_it(
    zero: dict[str, Any], device: str, is_open: bool
) -> None:
    configuration = {"zero_optimization": zero}
    assert buckets._is_overlap_open(configuration, torch.device(device)) == is_open


def test_an_overlap_needs_a_deepspeed_whose_reduction_waits_for_all_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.runtime.zero import stage_1_and_2

    from deepytorch.integrations import deepspeed as adapter

    assert adapter._waits_for_all_producers()
    monkeypatch.setattr(stage_1_and_2, "IPGBucket", dict)
    assert not adapter._waits_for_all_producers()


def ways_where_an_overlap_is_open(rank: int, world_size: int) -> list[Any]:
    """The way of gradients, were this CPU a GPU: with an overlap that wins, loses, is of no use."""

    def outcome(size: int, *, wins: bool) -> list[Any]:
        asked: list[float] = []

        def is_faster_beside(_: Any, *times: float) -> bool:
            asked.extend(times)
            return wins

        with pytest.MonkeyPatch.context() as patch:
            bucket = buckets._Bucket
            patch.setattr(buckets, "_is_overlap_open", lambda *_: True)
            patch.setattr(bucket, "measure_to_all", lambda _: 2.0)
            patch.setattr(bucket, "measure_to_owners", lambda _: 1.0)
            patch.setattr(bucket, "is_faster_beside", is_faster_beside)
            zero = buckets.fill_bucket_sizes(
                {"zero_optimization": {"stage": 2, "reduce_bucket_size": size}},
                torch.nn.Linear(64, 100),
                config.current(),
                torch.device("cpu"),
                may_overlap=True,
            )["zero_optimization"]
        keys = ("overlap_comm", "use_multi_rank_bucket_allreduce")
        return [*asked, *(zero.get(key) for key in keys)]

    return [
        *(outcome(2048, wins=wins) for wins in (True, False)),
        *(outcome(size, wins=True) for size in (4096, 1 << 20)),  # of 6500: two, one not full; one
    ]


def test_gradients_overlap_or_go_to_their_owners() -> None:
    tune = {"DEEPYTORCH_TUNE": "auto"}
    seen = spawn_ranks(ways_where_an_overlap_is_open, 2, backend="deepytorch", env=tune, fresh=True)
    waiting = [None, False]
    assert seen == [[[1.0, 2.0, True, None], [1.0, 2.0, *waiting], waiting, waiting]] * 2
