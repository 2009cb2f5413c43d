# SPDX-License-Identifier: Apache-2.0
"""Endless batches of one rank, whose order depends on the seed alone and can be continued."""

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from deepytorch.recipes._config import RankError, RecipeError

T = TypeVar("T")


class Batch(Protocol):
    """What the training loop asks of a recipe's batch."""

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
    ) -> None:
        if num_examples < batch_size * world_size:
            raise RecipeError(
                f"{num_examples} examples are too few for batch_size={batch_size} on {world_size} "
                "processes: lower batch_size or add data"
            )
        self._order = _Order(num_examples, batch_size, rank, world_size, seed)
        self._at_once = batch_size * world_size
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
            raise RankError(str(error).rpartition("RecipeError: ")[2].strip()) from error

    @property
    def position(self) -> int:
        """Batches taken since the beginning of training."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        self._position, self._batches = position, None

    @property
    def epoch_examples(self) -> int:
        """Of all ranks: as many as make whole batches for each."""
        return self._order.per_epoch * self._at_once

    def continue_from(
        self, position: int, epoch_examples: int, *, batch_size: int, world_size: int
    ) -> None:
        """Go on as after ``position`` batches of ``batch_size`` on each of ``world_size`` ranks.

        With the next examples of the same epoch, which has ``epoch_examples``. Where the batches
        here don't end at the same places, an epoch may end elsewhere, and less than a batch of each
        rank is seen again. Raises RecipeError when there are fewer examples than that.
        """
        if epoch_examples > self._order.num_examples:
            raise RecipeError(
                f"cannot resume: the data has {self._order.num_examples} examples, and an epoch of "
                f"the checkpoint had {epoch_examples}: give the data that it was trained on, or "
                "start a new run"
            )
        epoch, number = divmod(position, epoch_examples // (batch_size * world_size))
        if epoch_examples % self._at_once == 0:
            self._order.per_epoch = epoch_examples // self._at_once
        per_epoch = self._order.per_epoch
        taken = number * batch_size * world_size // self._at_once
        self.position = epoch * per_epoch + min(taken, per_epoch)


class _Order(Sampler[list[tuple[int, int]]]):
    """Lists of (index, epoch), from batch ``start`` on, without end."""

    def __init__(
        self, num_examples: int, batch_size: int, rank: int, world_size: int, seed: int
    ) -> None:
        self.start = 0
        self.per_epoch = num_examples // (batch_size * world_size)
        self.num_examples, self._batch_size = num_examples, batch_size
        self._rank, self._world_size, self._seed = rank, world_size, seed

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, first = divmod(self.start, self.per_epoch)
        while True:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self.num_examples, generator=generator).tolist()
            own = order[self._rank :: self._world_size]
            for number in range(first, self.per_epoch):
                chosen = own[number * self._batch_size : (number + 1) * self._batch_size]
                yield [(index, epoch) for index in chosen]
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

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self._draw(*key)


def in_batches(examples: Sequence[T], size: int) -> list[list[T]]:
    """Consecutive lists of ``size`` examples; the last may be shorter."""
    return [list(examples[start : start + size]) for start in range(0, len(examples), size)]
