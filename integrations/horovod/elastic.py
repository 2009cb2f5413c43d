"""Horovod's elastic API for jobs whose ranks stay the same.

Ranks can't come and go while a job runs. A script for elastic jobs runs all the same: its state is
given to all ranks at the start, and what it commits is kept. An operation that fails ends the job;
torchrun starts it again with the ranks that are left, from the script's last checkpoint.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.utils.data import Sampler

from deepytorch.integrations.horovod._world import rank, size
from deepytorch.integrations.horovod.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ElasticSampler(Sampler[int]):
    """Deals a dataset out to the ranks, and goes on behind what they have done of an epoch.

    Args:
        dataset: of constant length.
        shuffle: whether in another order in each epoch.
        seed: of that order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; to be called when the one before it has ended."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has done a batch of `batch_size` samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how much of it is done."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where the state was taken."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out what is not done yet."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        # The first ones again, so that all ranks have as many.
        whole = left + left[: self.total_size - len(left)]
        return iter(whole[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


class TorchState:
    """Holds what a training goes on from: models, optimizers, samplers, plain values by name.

    Args:
        model, optimizer: attributes of these names.
        **values: further attributes. Any but a module, optimizer or ElasticSampler must pickle.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        self._names = ["model", "optimizer", *values]
        self._reset_callbacks: list[Callable[[], object]] = []
        vars(self).update(values, model=model, optimizer=optimizer)
        self.save()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Note what `on_reset` is to call."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call what was registered."""
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the state as it is now, for `restore`."""
        self.save()

    def check_host_updates(self) -> None:
        """Nothing: the hosts of a job stay the same."""

    def save(self) -> None:
        """Keep the state as it is now, for `restore`."""
        self._states, self._plain = {}, {}
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, _WITH_STATE):
                self._states[name] = copy.deepcopy(value.state_dict())
            else:
                self._plain[name] = value

    def restore(self) -> None:
        """Go back to what was kept last."""
        for name, state in self._states.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        vars(self).update(self._plain)

    def sync(self) -> None:
        """Give every rank the state of rank 0, of the plain values what was kept last."""
        for name in self._states:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(broadcast_object(value.state_dict(), root_rank=0))
        vars(self).update(broadcast_object(self._plain, root_rank=0))
        self.save()


_WITH_STATE = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)


def run(func: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """A decorator: give every rank the state, the first argument, and call the function with it."""

    @functools.wraps(func)
    def synchronized(state: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        state.sync()
        return func(state, *args, **kwargs)

    return synchronized
