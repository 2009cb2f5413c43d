# SPDX-License-Identifier: Apache-2.0
"""Endless batches of one rank, whose order depends on the seed alone and can be continued."""

import functools
import itertools
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from deepytorch.recipes.base.config import RankRecipeError, RecipeError
from deepytorch.recipes.data.balance import Key, StepBalance
from deepytorch_core.data.balance import Imbalance

T = TypeVar("T")


class Batch(Protocol):
    """A recipe's batch, as the training loop needs it."""

    def to(self, device: torch.device) -> Any:
        """The same batch on ``device``."""
        ...

    def counts(self) -> torch.Tensor:
        """float32 [2]: what the mean loss is divided by; what the speed counts."""
        ...


BatchT = TypeVar("BatchT", bound=Batch)


class EndlessBatches(Generic[BatchT]):
    """This rank's batches for ever, reshuffled every epoch.

    Args:
        num_examples: of all ranks.
        draw: the example at an index; the second argument is the epoch, for augmentation that a
            resumed run repeats exactly.
        collate: examples to batch.
        balance: deals the examples of each step out; None: as a DistributedSampler does.
        lengths: tokens of each example, by which one batch takes more memory than another.
        names: of each example, by which a resumed run knows them again; None: by their lengths.
        what: the word for the examples in messages.

    ``position`` is how many batches were taken; setting it continues there. Raises RecipeError
    when there are too few examples to give every rank one batch.
    """

    def __init__(
        self,
        num_examples: int,
        draw: Callable[[int, int], T],
        collate: Callable[[list[T]], BatchT],
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        num_workers: int = 0,
        balance: StepBalance | None = None,
        lengths: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        what: str = "examples",
    ) -> None:
        if num_examples < batch_size * world_size:
            # If even batches of one need more, a lower batch_size alone is no way out.
            ways = ["lower batch_size"] if batch_size > 1 else []
            if num_examples < world_size > 1:
                ways.append("start fewer processes (--nproc-per-node)")
            raise RecipeError(
                f"{num_examples} {what} are too few for batch_size={batch_size} on {world_size} "
                f"processes: {' and '.join(ways)}{' or ' if ways else ''}add data"
            )
        self._order = _Order(num_examples, batch_size, rank, world_size, seed)
        self._order.balance = balance
        self._at_once = batch_size * world_size
        self._batch_size, self._lengths, self._what = batch_size, lengths, what
        self._names = names
        self._loader: DataLoader[Any] = DataLoader(
            _Drawn(draw),
            batch_sampler=self._order,
            collate_fn=collate,
            num_workers=num_workers,
            # Else each new iterator draws from torch's own numbers, and a resumed run has one more.
            generator=torch.Generator(),
            worker_init_fn=functools.partial(_only_its_rank_ends_it, os.getpid()),
        )
        self._position = 0
        self._batches: Iterator[BatchT] | None = None

    def __iter__(self) -> Iterator[BatchT]:
        return self

    def __next__(self) -> BatchT:
        if self._batches is None:
            self._order.start = self._position
            with _without_sigterm():  # what a worker starts before it could say so inherits it
                self._batches = iter(self._loader)
        self._position += 1
        try:
            return next(self._batches)
        except RecipeError as error:
            # No other rank has these examples; from a worker it comes with a traceback as its text.
            raise RankRecipeError(str(error).rpartition("RecipeError: ")[2].strip()) from error

    @property
    def position(self) -> int:
        """Batches taken since the beginning of training."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        self._position, self._batches = position, None

    @property
    def num_examples(self) -> int:
        """Return the examples of all ranks, with those that make no whole batch."""
        return self._order.num_examples

    @property
    def what(self) -> str:
        """The word for the examples in messages."""
        return self._what

    @property
    def epoch_examples(self) -> int:
        """Return the examples of all ranks in an epoch: as many as make whole batches for each."""
        return self._order.per_epoch * self._at_once

    @property
    def fingerprint(self) -> int | None:
        """Return a mark that the same examples share and others hardly have; None if unknown."""
        marks = self._lengths if self._names is None else self._names
        return None if marks is None else zlib.crc32(repr(list(marks)).encode())

    def largest(self) -> BatchT:
        """A batch of the longest examples, which no other outgrows; without lengths the next."""
        if self._lengths is None:
            return next(self)
        indices = sorted(range(len(self._lengths)), key=self._lengths.__getitem__)
        drawn = [self._loader.dataset[index, 0] for index in indices[-self._batch_size :]]
        batch: BatchT = self._loader.collate_fn(drawn)
        return batch

    def fit_steps(self, accumulation: int) -> None:
        """Take so many batches for a step from now on; for batches with balance."""
        if self._order.balance is not None:
            self._order.balance.accumulation = accumulation

    def imbalance(self, most_steps: int = 100) -> Imbalance | None:
        """Measure the first steps' imbalance, without and with balance; None if it has none."""
        balance = self._order.balance
        if balance is None:
            return None
        num_steps = max(1, self._order.per_epoch // balance.accumulation)
        return balance.imbalance(self._order.rounds(0), min(most_steps, num_steps))

    def continue_from(
        self, position: int, epoch_examples: int, *, batch_size: int, world_size: int
    ) -> None:
        """Go on as after ``position`` batches of ``batch_size`` on each of ``world_size`` ranks.

        It goes on with the next examples of the same epoch, which has ``epoch_examples``. The
        batches here may not end at the same places. Then an epoch may end elsewhere, and less than
        a batch of each rank is seen again. Raises RecipeError when there are fewer examples than
        that.
        """
        if epoch_examples > self._order.num_examples:
            raise RecipeError(
                f"cannot resume: the data has {self._order.num_examples} {self._what}, and an "
                f"epoch of the checkpoint had {epoch_examples}: give the data that it was trained "
                "on, or start a new run"
            )
        epoch, number = divmod(position, epoch_examples // (batch_size * world_size))
        if epoch_examples % self._at_once == 0:
            self._order.per_epoch = epoch_examples // self._at_once
        per_epoch = self._order.per_epoch
        taken = number * batch_size * world_size // self._at_once
        self.position = epoch * per_epoch + min(taken, per_epoch)


class _Order(Sampler[list[Key]]):
    """Lists of (index, epoch), from batch ``start`` on, without end."""

    def __init__(
        self, num_examples: int, batch_size: int, rank: int, world_size: int, seed: int
    ) -> None:
        self.start = 0
        self.balance: StepBalance | None = None
        self.per_epoch = num_examples // (batch_size * world_size)
        self.num_examples, self._batch_size = num_examples, batch_size
        self._rank, self._world_size, self._seed = rank, world_size, seed

    def __iter__(self) -> Iterator[list[Key]]:
        rounds = self.rounds(self.start)
        if self.balance is None:
            for row in rounds:
                yield row[self._rank :: self._world_size]
        while self.balance is not None:
            # Steps begin where training does, or goes on, and may lie in two epochs.
            step = list(itertools.islice(rounds, self.balance.accumulation))
            yield from self.balance.dealt(step)[self._rank]

    def rounds(self, start: int) -> Iterator[list[Key]]:
        """The examples of all ranks' batches of one number, from ``start`` on, without end."""
        epoch, first = divmod(start, self.per_epoch)
        size = self._batch_size * self._world_size
        while True:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self.num_examples, generator=generator).tolist()
            for number in range(first, self.per_epoch):
                row = order[number * size : (number + 1) * size]
                yield [(index, epoch) for index in row]
            epoch, first = epoch + 1, 0


@contextmanager
def _without_sigterm() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _only_its_rank_ends_it(rank_pid: int, worker: int) -> None:
    """Keep SIGTERM from a worker unless its rank sends it, as it does at its own end.

    Who stops a job may tell all of its processes, and the rank needs its workers to finish a step.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid:
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class _Drawn(Dataset[Any]):
    def __init__(self, draw: Callable[[int, int], Any]) -> None:
        self._draw = draw

    def __getitem__(self, key: Key) -> Any:
        return self._draw(*key)


def hold_out(shuffled: Sequence[T], wanted: int) -> tuple[list[T], list[T], str]:
    """Return what is kept out of training, the rest, and words that say how much is kept.

    A tenth at most is kept, but one at least; a single one is trained on, and none is kept.
    """
    number = min(wanted, max(1, len(shuffled) // 10), len(shuffled) - 1)
    told = f"{number} held out"
    if number == 0:
        told = "none held out, as there is only one"
    elif number < wanted:
        told += f" (held_out={wanted}, but at most a tenth of the data)"
    return list(shuffled[:number]), list(shuffled[number:]), told


def in_batches(examples: Sequence[T], size: int) -> list[list[T]]:
    """Consecutive lists of ``size`` examples; the last may be shorter."""
    return [list(examples[start : start + size]) for start in range(0, len(examples), size)]
