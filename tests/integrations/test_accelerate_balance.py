"""TokenBalancedBatchSampler under Accelerate itself, and beside transformers' rebalancing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

import deepytorch
from deepytorch_core.data import TokenBalancedBatchSampler
from deepytorch_core.testing import spawn_ranks

NUM_SAMPLES = 37
LENGTHS = [5 + (index * 7919) % 97 for index in range(NUM_SAMPLES)]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def dealt_out(
    ranks: int, batch_sampler: Any, *, even_batches: bool, skip: int = 0
) -> list[list[list[int]]]:
    """Each rank's batches after Accelerate's own preparation of a loader."""
    found = []
    for rank in range(ranks):
        loader = prepare_data_loader(
            DataLoader(Rows(), batch_sampler=batch_sampler),
            num_processes=ranks,
            process_index=rank,
            even_batches=even_batches,
        )
        if skip:
            loader = skip_first_batches(loader, skip)
        found.append([batch.tolist() for batch in loader])
    return found


def per_step(batches_of_ranks: list[list[list[int]]], accumulation: int) -> list[list[int]]:
    longest = max(len(batches) for batches in batches_of_ranks)
    return [
        sorted(
            index
            for batches in batches_of_ranks
            for batch in batches[start : start + accumulation]
            for index in batch
        )
        for start in range(0, longest, accumulation)
    ]


@pytest.mark.parametrize(
    ("drop_last", "even_batches"), [(True, True), (False, True), (False, False)]
)
@pytest.mark.parametrize(
    ("ranks", "batch_size", "accumulation"),
    [(2, 4, 1), (2, 4, 2), (3, 2, 4), (4, 1, 2), (5, 16, 1)],
)
def test_balance_keeps_what_accelerate_deals_out_in_each_step(
    ranks: int, batch_size: int, accumulation: int, drop_last: bool, even_batches: bool
) -> None:
    stock = BatchSampler(SequentialSampler(range(NUM_SAMPLES)), batch_size, drop_last)
    sampler = TokenBalancedBatchSampler(
        LENGTHS,
        sampler=stock,
        normalization="global_tokens",
        accumulation=accumulation,
        num_replicas=ranks,
        even_batches=even_batches,
    )
    ours = dealt_out(ranks, sampler, even_batches=even_batches)
    assert len({len(batches) for batches in ours}) == 1, "every rank takes part in every step"
    assert sum(map(len, ours)) == len(sampler)
    expected = per_step(dealt_out(ranks, stock, even_batches=even_batches), accumulation)
    assert per_step(ours, accumulation) == expected
    if not drop_last and not even_batches:
        assert sorted(index for step in expected for index in step) == list(range(NUM_SAMPLES))
    skipped = dealt_out(ranks, sampler, even_batches=even_batches, skip=1)
    assert skipped == [batches[1:] for batches in ours]


def epochs_under_accelerate(rank: int, world_size: int, random: bool) -> list[Any]:
    """This rank's batches in two epochs, of ours and of the stock loader."""
    deepytorch.deactivate()  # importing the tests' module may have activated it
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    found: list[Any] = []
    for balance in (True, False):
        torch.manual_seed(11)
        order = (
            RandomSampler(range(NUM_SAMPLES)) if random else SequentialSampler(range(NUM_SAMPLES))
        )
        stock = BatchSampler(order, 4, False)
        chosen = (
            TokenBalancedBatchSampler(LENGTHS, sampler=stock, normalization="global_tokens")
            if balance
            else stock
        )
        loader = accelerator.prepare(DataLoader(Rows(), batch_sampler=chosen))
        found.append([[batch.tolist() for batch in loader] for _ in range(2)])
    return found


@pytest.mark.parametrize("random", [False, True])
def test_balance_passes_through_prepare_on_two_ranks(random: bool) -> None:
    ranks = spawn_ranks(epochs_under_accelerate, 2, random, backend="gloo")
    for epoch in range(2):
        ours, stock = ([rank[arm][epoch] for rank in ranks] for arm in (0, 1))
        assert per_step(ours, 1) == per_step(stock, 1)
        assert {index for rank in ours for batch in rank for index in batch} == set(
            range(NUM_SAMPLES)
        )
        tokens = [[sum(LENGTHS[i] for i in batch) for batch in rank] for rank in ours]
        before = [[sum(LENGTHS[i] for i in batch) for batch in rank] for rank in stock]
        waits, waited = (
            sum(max(step) for step in zip(*arm, strict=True)) for arm in (tokens, before)
        )
        assert waits < waited
    first, second = (ranks[0][0][epoch] for epoch in range(2))
    assert (first != second) == random


def test_balance_beside_transformers_rebalancing() -> None:
    """Both keep a step's samples, in stock order; ours is at least as even in tokens."""
    pytest.importorskip("transformers", minversion="5.20")
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    generator = torch.Generator().manual_seed(3)
    drawn = torch.empty(512).log_normal_(5.0, 0.9, generator=generator)
    lengths = drawn.clamp(1, 1024).int().tolist()
    ranks, accumulation = 4, 2
    effective = ranks * accumulation * 4
    theirs = [
        list(
            BatchRebalanceSampler(lengths, effective, ranks, accumulation, rank=rank, shuffle=False)
        )
        for rank in range(ranks)
    ]
    ours = [
        list(
            TokenBalancedBatchSampler(
                lengths,
                4,
                normalization="global_tokens",
                accumulation=accumulation,
                num_replicas=ranks,
                rank=rank,
                shuffle=False,
            )
        )
        for rank in range(ranks)
    ]
    assert per_step(ours, accumulation) == per_step(theirs, accumulation)

    def waiting(batches_of_ranks: list[list[list[int]]]) -> int:
        """Tokens of the heaviest rank, summed over the steps."""
        rows = [[sum(lengths[i] for i in batch) for batch in rank] for rank in batches_of_ranks]
        return sum(
            max(sum(row[start : start + accumulation]) for row in rows)
            for start in range(0, len(rows[0]), accumulation)
        )

    assert sum(lengths) / ranks <= waiting(ours) <= waiting(theirs)
