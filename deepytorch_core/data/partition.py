"""Samples into groups of even cost: pure functions, the same answer on every rank.

Samples go to the lightest group so far, the longest first (LPT, Graham 1969). Moves and swaps
between the heaviest and the lightest group follow while they help.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

# Moves and swaps for each group; where the search ends by itself it needs far fewer.
_REFINEMENTS = 4


@dataclass(frozen=True)
class TokenCost:
    """The cost of a micro-batch: `linear * sum(length) + quadratic * sum(length ** 2)`.

    The linear term is matrix work, the quadratic one attention. A decoder layer of width h spends
    about 24 h**2 + 4 h * length operations on a token, so quadratic / linear = 1 / (6 h).
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if self.linear < 0 or self.quadratic < 0 or not self.linear + self.quadratic > 0:
            raise ValueError(
                f"{self}: neither may be negative and one must be above 0; tokens alone are "
                "TokenCost(linear=1, quadratic=0)"
            )

    @classmethod
    def of_decoder(cls, hidden_size: int) -> TokenCost:
        """The cost of a decoder with layers of this width."""
        return cls(1.0, 1.0 / (6 * hidden_size))

    def of(self, length: int) -> float:
        """The cost of one sample of so many tokens."""
        return self.linear * length + self.quadratic * length * length


def even_groups(costs: Sequence[float], num_groups: int) -> list[list[int]]:
    """Positions of `costs` in `num_groups` groups of about the same sum, each ascending.

    No group is empty. Raises ValueError for fewer positions than groups.
    """
    if len(costs) < num_groups:
        raise ValueError(f"{len(costs)} samples can't fill {num_groups} groups")
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    # The size breaks ties, so that samples without cost fill groups too.
    lightest = [(0.0, 0, number) for number in range(num_groups)]
    for position in sorted(range(len(costs)), key=lambda position: -costs[position]):
        total, size, number = lightest[0]
        groups[number].append(position)
        heapq.heapreplace(lightest, (total + costs[position], size + 1, number))
    totals = [0.0] * num_groups
    for total, _, number in lightest:
        totals[number] = total
    for _ in range(_REFINEMENTS * num_groups):
        if not _refine(groups, totals, costs):
            break
    return [sorted(group) for group in groups]


def _refine(groups: list[list[int]], totals: list[float], costs: Sequence[float]) -> bool:
    """One move or swap that brings the heaviest and the lightest group closer; False if none."""
    heavy = max(range(len(groups)), key=lambda number: totals[number])
    light = min(range(len(groups)), key=lambda number: totals[number])
    gap = totals[heavy] - totals[light]
    # An exchange halves the gap at best; a millionth of it is rounding.
    best, chosen = gap * (1 - 1e-6), None
    for given in groups[heavy]:
        takes: list[int | None] = [*groups[light]]
        if len(groups[heavy]) > 1:
            takes.append(None)
        for taken in takes:
            change = costs[given] - (0.0 if taken is None else costs[taken])
            left = abs(gap - 2 * change)
            if left < best:
                best, chosen = left, (given, taken, change)
    if chosen is None:
        return False
    given, taken, change = chosen
    groups[heavy].remove(given)
    groups[light].append(given)
    if taken is not None:
        groups[light].remove(taken)
        groups[heavy].append(taken)
    totals[heavy] -= change
    totals[light] += change
    return True


Arrangement = list[list[list[int]]]
"""arrangement[rank][slot] are the positions in that rank's micro-batch of that number."""


def deal(groups: Sequence[list[int]], costs: Sequence[float], num_ranks: int) -> Arrangement:
    """Groups to ranks and micro-batches: alike ones at the same time, ranks even in sum.

    The heaviest come first, so that a step's peak of memory does.
    """
    totals = {
        index: sum(costs[position] for position in groups[index]) for index in range(len(groups))
    }
    order = sorted(totals, key=lambda index: -totals[index])
    arrangement: Arrangement = [[] for _ in range(num_ranks)]
    spent = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: spent[rank])
        for rank, index in zip(ranks, order[start : start + num_ranks], strict=True):
            arrangement[rank].append(groups[index])
            spent[rank] += totals[index]
    return arrangement


@dataclass(frozen=True)
class Load:
    """How heavy an arrangement is for those who wait for each other."""

    ranks: float  # the heaviest rank: who waits at the end of the step (DDP, ZeRO-1 and 2)
    slots: float  # the sum of the heaviest micro-batches: who waits at each (ZeRO-3, FSDP)
    group: float  # the heaviest micro-batch: memory
    mean: float  # of the ranks

    def is_as_light_as(self, other: Load) -> bool:
        """Whether nobody waits longer than with `other`, and no micro-batch is larger."""
        margin = 1 + 1e-9
        return (
            self.ranks <= other.ranks * margin
            and self.slots <= other.slots * margin
            and self.group <= other.group * margin
        )


def load_of(arrangement: Arrangement, costs: Sequence[float]) -> Load:
    table = [[sum(costs[p] for p in group) for group in groups] for groups in arrangement]
    ranks = [sum(row) for row in table]
    return Load(
        ranks=max(ranks),
        slots=sum(max(column) for column in zip(*table, strict=True)),
        group=max(max(row) for row in table),
        mean=sum(ranks) / len(ranks),
    )


def evened(stock: Arrangement, costs: Sequence[float]) -> Arrangement:
    """As many micro-batches of even cost, or `stock` where that is lighter for somebody."""
    even = deal(even_groups(costs, len(stock) * len(stock[0])), costs, len(stock))
    return even if load_of(even, costs).is_as_light_as(load_of(stock, costs)) else stock
