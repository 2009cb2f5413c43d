"""TokenBalancedBatchSampler: the stock sampler's samples, evenly spread over ranks and batches.

With sequences of different lengths the rank that drew the long ones makes all others wait. Which
samples an optimizer step sees decides about its gradient; which rank computes which of them does
not, as long as the loss is divided by the tokens of all ranks and micro-batches
(`deepytorch_core.nn.loss.global_token_mean`). So a step keeps its samples, and they change places
inside it.
"""

from __future__ import annotations

import array
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from deepytorch_core.base import decisions
from deepytorch_core.data.global_steps import Dealing, Step, full_order
from deepytorch_core.data.partition import Arrangement, Load, TokenCost, evened, load_of

WHAT = "token balance"
# Steps of the first epoch that the report is about.
_REPORTED_STEPS = 100

Normalization = Literal["global_tokens", "other"]


@dataclass(frozen=True)
class Imbalance:
    """Cost of the heaviest rank over the mean of the ranks, over `num_steps` optimizer steps.

    1 is even. DDP waits for the heaviest rank, so `before / after` bounds what balance can gain.
    """

    before: float
    after: float
    num_steps: int

    @classmethod
    def of(cls, loads: Sequence[tuple[Load, Load]]) -> Imbalance:
        """Compute it from the stock arrangement's loads and ours in each step."""
        mean = sum(stock.mean for stock, _ in loads)
        if not mean:
            return cls(1, 1, 0)
        before = sum(stock.ranks for stock, _ in loads)
        return cls(before / mean, sum(ours.ranks for _, ours in loads) / mean, len(loads))

    def __str__(self) -> str:
        return (
            f"the heaviest rank has {self.before:.3f} times the mean cost without it and "
            f"{self.after:.3f} times with it ({self.num_steps} steps)"
        )


class TokenBalancedBatchSampler(BatchSampler):
    """Batches with the stock sampler's samples for each optimizer step, even in tokens.

    Batches differ in size then, and every rank has the same number of them. Which batches it
    yields follows from what it is given:

    * a DistributedSampler, or `rank`: those of that rank, for a loader that is used as it is;
    * else those of all ranks in turn, for a loader that goes through Accelerate's `prepare`.
      Accelerate deals out whole batches, and each rank gets exactly the ones meant for it.

    It balances only where the loss is divided by the tokens of all ranks and micro-batches, as
    `normalization="global_tokens"` states. Otherwise it yields the stock batches and says why:
    moving samples would change the gradient.

    Args:
        lengths: tokens of every sample of the data set, by index.
        batch_size: samples in a stock micro-batch; left out where `sampler` is a batch sampler.
        sampler: the stock sampler or batch sampler. Without one the order is that of a
            DistributedSampler with `shuffle` and `seed`. Ranks must draw the same order.
        normalization: what the loss is divided by: "global_tokens", or "other".
        accumulation: micro-batches of each optimizer step on each rank.
        num_replicas: ranks; default: the sampler's, else those of torch.distributed, else 1.
        rank: see above; default: the sampler's.
        drop_last: leave out samples that don't fill a batch on every rank, as the stock loader's
            argument does; left out where `sampler` is a batch sampler.
        even_batches: as in Accelerate: at the epoch's end its first samples come again until every
            rank's last batch is full. False: every index once, except that a last step with fewer
            samples than ranks is filled up to one for each. No effect with drop_last or a
            DistributedSampler.
        cost: what is made even.
        decline: asked once, when the first epoch begins, for what is not known before; the reason
            why samples stay where stock has them, the same on all ranks, or None.
        shuffle, seed: of the order, where no sampler is given.

    Attributes:
        sampler: where the order comes from; may be replaced, as Accelerate does.
        batch_size: the stock batch size, or None while balancing, when batches differ.

    Raises ValueError for arguments that contradict each other, and when a length is missing.
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        batch_size: int | None = None,
        *,
        sampler: Any = None,
        normalization: Normalization,
        accumulation: int = 1,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool | None = None,
        even_batches: bool = True,
        cost: TokenCost | None = None,
        decline: Callable[[], str | None] | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if normalization not in ("global_tokens", "other"):
            raise ValueError(
                f"normalization={normalization!r}: expected 'global_tokens' (the loss is divided "
                "by the tokens of all ranks and micro-batches) or 'other'"
            )
        if isinstance(sampler, BatchSampler):
            _require_unset("batch_size", batch_size)
            _require_unset("drop_last", drop_last)
            batch_size, drop_last = sampler.batch_size, sampler.drop_last
            sampler = sampler.sampler
        ranks = num_replicas or getattr(sampler, "num_replicas", None) or _world_size()
        _require_positive(batch_size=batch_size, accumulation=accumulation, num_replicas=ranks)
        assert batch_size is not None
        own = isinstance(sampler, DistributedSampler)
        for name, given in (("num_replicas", num_replicas), ("rank", rank)):
            if own and given not in (None, getattr(sampler, name)):
                raise ValueError(f"{name}={given}, but the sampler's is {getattr(sampler, name)}")
        self.rank = sampler.rank if own and rank is None else rank
        if self.rank is not None and not 0 <= self.rank < ranks:
            raise ValueError(f"rank={self.rank} is not one of {ranks} ranks")
        listed = lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths
        if sampler is None:
            number, many = (0, 1) if self.rank is None else (self.rank, ranks)
            sampler = DistributedSampler(
                range(len(listed)),  # type: ignore[arg-type]
                many,
                number,
                shuffle=shuffle,
                seed=seed,
                drop_last=bool(drop_last),
            )
        self.sampler = sampler
        self.drop_last = bool(drop_last)
        self.epoch = 0
        self._dealing = Dealing(
            num_ranks=ranks,
            batch_size=batch_size,
            accumulation=accumulation,
            single=isinstance(sampler, DistributedSampler) and sampler.num_replicas == ranks,
            drop_last=self.drop_last,
            even_batches=even_batches,
        )
        self._require_one_order()
        weigh = cost or TokenCost()
        self._costs = [weigh.of(length) for length in listed]
        self._why_off = self._find_why_off(normalization)
        self.batch_size = batch_size if self._why_off else None  # type: ignore[assignment]
        # The epoch that was begun last, how far it is, and what its order was drawn from.
        self._begun: int | None = None
        self._done = 0
        self._drawn_from: torch.Tensor | None = None
        self._resumes = False  # the next iteration alone
        self._reported = False
        self._decline, self._declined = decline, False
        if self._why_off:
            decisions.record(WHAT, "off", self._why_off)

    @property
    def is_balancing(self) -> bool:
        """Whether batches differ from the stock sampler's."""
        return self._why_off is None and not self._declined

    def set_epoch(self, epoch: int) -> None:
        """Draw another order, as `DistributedSampler.set_epoch` does."""
        if epoch != self._begun and not self._resumes:
            self._begun = None
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of an epoch: one rank's, or all ranks' where no rank is given."""
        stock = self._stock_batches()
        if stock is not None:
            return len(stock)
        return self._num_slots() * (self._dealing.num_ranks if self.rank is None else 1)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._current_epoch()
        self._done = first = self._resumed(epoch) if self._resumes else 0
        self._resumes = False
        self._begun = epoch
        self._drawn_from = self._generator_state()
        for number, batches in self._rounds(first):
            self._done = number + 1
            yield from batches

    def _resumed(self, epoch: int) -> int:
        """The micro-batch of `epoch` to go on with after `load_state_dict`."""
        assert self._begun is not None
        if epoch < self._begun:
            raise ValueError(
                f"{WHAT}: the state is of epoch {self._begun} and the loader begins epoch {epoch}: "
                f"call set_epoch({self._begun}) on the loader after load_state_dict"
            )
        generator = getattr(self.sampler, "generator", None)
        if generator is not None and self._drawn_from is not None:
            generator.set_state(self._drawn_from)
        if epoch == self._begun:
            return self._done
        if not hasattr(self.sampler, "set_epoch"):
            # The rest of that epoch is left out, but its order has been drawn.
            for _ in self._rounds(self._num_slots()):
                pass
        return 0

    def _current_epoch(self) -> int:
        """The sampler's, where it has one: Accelerate sets that one alone."""
        own = getattr(self.sampler, "epoch", None)
        return own if isinstance(own, int) and hasattr(self.sampler, "set_epoch") else self.epoch

    def _generator_state(self) -> torch.Tensor | None:
        generator = getattr(self.sampler, "generator", None)
        return None if generator is None else generator.get_state()

    def _rounds(self, first: int) -> Iterator[tuple[int, list[list[int]]]]:
        """From micro-batch `first` on: its number, and this rank's batch or those of all ranks."""
        stock = self._stock_batches()
        if stock is not None:
            ranks = self._dealing.num_ranks if self.rank is None else 1
            batches = iter(stock)
            for number in itertools.count():
                row = list(itertools.islice(batches, ranks))
                if not row:
                    return
                if number >= first:
                    yield number, row
        order = self._dealing.settled(full_order(self.sampler))
        if self.is_balancing and not self._reported:
            self._reported = True
            reason = self._decline() if self._decline else None
            self._declined = reason is not None
            decisions.record(
                WHAT, *(("off", reason) if reason else ("on", str(self._imbalance(order))))
            )
        number = 0
        for step in self._dealing.steps(len(order)):
            if number + step.num_slots > first:
                samples = order[step.start : step.stop]
                chosen = self._choose(step, samples)
                mine = chosen if self.rank is None else [chosen[self.rank]]
                for slot in range(max(0, first - number), step.num_slots):
                    batches_now = [[samples[place] for place in groups[slot]] for groups in mine]
                    yield number + slot, batches_now
            number += step.num_slots

    def imbalance(self, num_steps: int = _REPORTED_STEPS) -> Imbalance:
        """Return what the first `num_steps` steps of this epoch cost the heaviest rank.

        It draws an order of its own: with a sampler that has no `set_epoch` (a RandomSampler) that
        is another one than the next epoch's.
        """
        return self._imbalance(self._dealing.settled(full_order(self.sampler)), num_steps)

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Return where the epoch stands, for `load_state_dict`.

        Args:
            batches: micro-batches that this rank's loop has finished; default: as many as were
                handed out, which is more where a loader with workers fetches ahead.
        """
        begun = self._begun is not None
        done = self._done if begun else 0
        return {
            "epoch": self._begun if begun else self._current_epoch(),
            "batches": done if batches is None else batches,
            "generator": self._drawn_from if begun else self._generator_state(),
            "plan": self._plan(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the next iteration yields the rest of that epoch.

        That is nothing after its last batch. With a later epoch set, the rest is left out.

        Raises ValueError when lengths, ranks or sizes are others than then; so does the iteration
        of an earlier epoch.
        """
        if state["plan"] != self._plan():
            changed = [name for name, value in self._plan().items() if value != state["plan"][name]]
            raise ValueError(
                f"{WHAT}: the state is of a sampler with other {', '.join(changed)}: continue with "
                "the same, or start the epoch again"
            )
        self.set_epoch(state["epoch"])
        done = state["batches"]
        self._begun = state["epoch"]
        self._done = done and (done - 1) % max(1, self._num_slots()) + 1
        self._drawn_from = state["generator"]
        self._resumes = True

    def _find_why_off(self, normalization: Normalization) -> str | None:
        if normalization != "global_tokens":
            return (
                "the loss is not divided by the tokens of all ranks and micro-batches, so moving "
                "samples would change the gradient"
            )
        if self._dealing.num_ranks * self._dealing.accumulation == 1:
            return "there is one rank and one micro-batch a step, so nothing to balance"
        return None

    def _stock_batches(self) -> BatchSampler | None:
        """While not balancing: the stock batch sampler, unless only `rank` says who gets what."""
        if self._why_off is None or (self.rank is not None and not self._dealing.single):
            return None
        return BatchSampler(self.sampler, self._dealing.batch_size, self.drop_last)

    def _require_one_order(self) -> None:
        draws_alone = isinstance(self.sampler, RandomSampler) and self.sampler.generator is None
        if draws_alone and self.rank is not None and self._dealing.num_ranks > 1:
            raise ValueError(
                "a RandomSampler without a generator draws another order on every rank: give it "
                "generator=torch.Generator().manual_seed(...), or pass a DistributedSampler"
            )

    def _num_slots(self) -> int:
        """Micro-batches of each rank in an epoch."""
        stock = self._stock_batches()
        if stock is not None:
            return math.ceil(len(stock) / (self._dealing.num_ranks if self.rank is None else 1))
        sampler: Any = self.sampler
        found = len(sampler) * getattr(sampler, "num_replicas", 1)
        steps = self._dealing.steps(self._dealing.num_samples(found))
        return sum(step.num_slots for step in steps)

    def _choose(self, step: Step, samples: list[int]) -> Arrangement:
        stock = self._dealing.stock(step)
        if not self.is_balancing:
            return stock
        return evened(stock, self._costs_of(samples))

    def _costs_of(self, samples: list[int]) -> list[float]:
        try:
            return [self._costs[index] for index in samples]
        except IndexError:
            raise ValueError(
                f"{WHAT}: the sampler drew index {max(samples)} and `lengths` has "
                f"{len(self._costs)} entries: give the length of every sample"
            ) from None

    def _imbalance(self, order: list[int], num_steps: int = _REPORTED_STEPS) -> Imbalance:
        steps = self._dealing.steps(len(order))[:num_steps]
        loads = []
        for step in steps:
            samples = order[step.start : step.stop]
            costs = self._costs_of(samples)
            stock = load_of(self._dealing.stock(step), costs)
            loads.append((stock, load_of(self._choose(step, samples), costs)))
        return Imbalance.of(loads)

    def _plan(self) -> dict[str, Any]:
        """Return what has to be the same for a state to fit."""
        digest = hashlib.sha256(array.array("d", self._costs).tobytes()).hexdigest()
        dealing = self._dealing
        return {
            "lengths": digest[:16],
            "ranks": dealing.num_ranks,
            "batch_size": dealing.batch_size,
            "accumulation": dealing.accumulation,
            "tail": (dealing.drop_last, dealing.even_batches),
            "normalization": self._why_off is None,
        }


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _require_unset(name: str, value: Any) -> None:
    if value is not None:
        raise ValueError(
            f"{name}={value!r} beside a batch sampler, which has its own: leave it out"
        )


def _require_positive(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number above 0")
