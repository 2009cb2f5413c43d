"""Tells which samples stock training takes for a step, and which rank and batch gets them.

Two ways of dealing are common. A DistributedSampler deals out single samples: rank r takes samples
r, r + n, r + 2n ... of the epoch's order and batches them by itself. Accelerate, and so Trainer,
deals out whole batches: batch i of the epoch goes to rank i % n. Either way an optimizer step takes
the next `num_ranks * accumulation * batch_size` samples of the epoch's order.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler

from deepytorch_core.data.partition import Arrangement


@dataclass(frozen=True)
class Step:
    """One optimizer step: a run of the epoch's order."""

    start: int
    stop: int
    num_slots: int  # micro-batches of each rank


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How an epoch's order becomes steps. Sizes count samples.

    Args:
        single: samples are dealt out one by one, else batches.
        drop_last: samples that don't fill a batch on every rank are left out.
        even_batches: the first samples of the epoch come again until every rank's last batch is
            full, as with Accelerate. It counts where batches are dealt out and none is left out.
            Without it samples come again only where a rank would have nothing otherwise.
    """

    num_ranks: int
    batch_size: int
    accumulation: int
    single: bool
    drop_last: bool
    even_batches: bool

    @property
    def _round(self) -> int:
        return self.num_ranks * self.batch_size

    def num_samples(self, found: int) -> int:
        """How many samples an epoch of `found` has once its tail is settled."""
        full = found // self._round * self._round
        tail = found - full
        if not tail or self.drop_last:
            return full
        if self.single:
            return found  # a DistributedSampler has seen to it already
        if self.even_batches:
            return full + self._round
        in_last_step = found % (self._round * self.accumulation)
        return found - in_last_step + max(in_last_step, self.num_ranks)

    def settled(self, order: Sequence[int]) -> list[int]:
        """The epoch's order with its tail left out or filled from the start."""
        wanted = self.num_samples(len(order))
        return list(itertools.islice(itertools.cycle(order), wanted))

    def steps(self, num_samples: int) -> list[Step]:
        """Steps of a settled order. Every rank has the same number of micro-batches in each."""
        size = self._round * self.accumulation
        found = []
        for start in range(0, num_samples, size):
            length = min(size, num_samples - start)
            # At least a sample for each micro-batch, where the last round is not a full one.
            num_slots = min(math.ceil(length / self._round), length // self.num_ranks)
            found.append(Step(start, start + length, num_slots))
        return found

    def stock(self, step: Step) -> Arrangement:
        """The stock arrangement, as positions in the step.

        Batches that are not made even are dealt out one by one: nobody goes without.
        """
        ranks, slots, length = self.num_ranks, step.num_slots, step.stop - step.start

        def batch(rank: int, slot: int) -> list[int]:
            first = slot * self._round
            if self.single:
                return list(range(first + rank, min(first + self._round, length), ranks))
            if length % self._round:
                return list(range(slot * ranks + rank, length, slots * ranks))
            return list(range(first + rank * self.batch_size, first + (rank + 1) * self.batch_size))

        return [[batch(rank, slot) for slot in range(slots)] for rank in range(ranks)]


def full_order(sampler: Any) -> list[int]:
    """The epoch's order over all ranks: of a DistributedSampler, or of any sampler as it is."""
    if not isinstance(sampler, DistributedSampler):
        return [int(index) for index in sampler]
    columns = []
    for rank in range(sampler.num_replicas):
        rank_sampler = copy.copy(sampler)
        rank_sampler.rank = rank
        columns.append([int(index) for index in rank_sampler])
    return list(_interleaved(columns))


def _interleaved(columns: Sequence[Sequence[int]]) -> Iterator[int]:
    for row in zip(*columns, strict=True):
        yield from row
