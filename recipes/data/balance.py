# SPDX-License-Identifier: Apache-2.0
"""``token_balance=``: an optimizer step's examples, evenly spread over ranks and micro-batches.

The recipes' loss is a mean over the tokens of all of them, so it does not depend on which rank
computes which example. The rank that drew the long ones keeps nobody waiting.
"""

from collections.abc import Iterator, Sequence

from deepytorch_core.data.balance import Imbalance
from deepytorch_core.data.partition import Arrangement, evened, load_of

Key = tuple[int, int]
"""An example's index, and the epoch."""


class StepBalance:
    """Deals the examples of a step out.

    Args:
        lengths: tokens of every example.
        world_size: ranks.
        accumulation: micro-batches of a step on each rank; may be set anew before the first batch.
    """

    def __init__(self, lengths: Sequence[int], *, world_size: int, accumulation: int) -> None:
        self.accumulation = accumulation
        self._lengths, self._world_size = lengths, world_size

    def dealt(self, rounds: Sequence[Sequence[Key]]) -> list[list[list[Key]]]:
        """For each rank its micro-batches.

        ``rounds`` are the examples of all ranks, micro-batch by micro-batch, in stock's order.
        """
        examples, stock, lengths = self._laid_out(rounds)
        return [
            [[examples[place] for place in group] for group in groups]
            for groups in evened(stock, lengths)
        ]

    def imbalance(self, rounds: Iterator[Sequence[Key]], num_steps: int) -> Imbalance:
        """Measure the imbalance of the next steps, without and with balance."""
        loads = []
        for _ in range(num_steps):
            step = [next(rounds) for _ in range(self.accumulation)]
            _, stock, lengths = self._laid_out(step)
            loads.append((load_of(stock, lengths), load_of(evened(stock, lengths), lengths)))
        return Imbalance.of(loads)

    def _laid_out(
        self, rounds: Sequence[Sequence[Key]]
    ) -> tuple[list[Key], Arrangement, list[int]]:
        """The step's examples, where stock has each of them, and how long they are."""
        stock: Arrangement = [[] for _ in range(self._world_size)]
        examples: list[Key] = []
        for row in rounds:
            start, stop = len(examples), len(examples) + len(row)
            for rank, groups in enumerate(stock):
                groups.append(list(range(start + rank, stop, self._world_size)))
            examples += row
        return examples, stock, [self._lengths[index] for index, _ in examples]
