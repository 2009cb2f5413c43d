"""The next batch is loaded while the GPU is busy with the forward pass.

A loader without workers loads a batch when it is asked for one, and the GPU has nothing to do
meanwhile. Here one batch is loaded before: its samples are those that the sampler would have drawn,
and random numbers come as they would have come. So only loaders are served whose data set, sampler
and collate function are known to do nothing else; their settings stay stock's.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import RandomSampler, Subset, TensorDataset, default_collate

from deepytorch.integrations.common import contract
from deepytorch_core import guard
from deepytorch_core.base import beside
from deepytorch_core.base.patching import original_of

_WHY = "the next batch is loaded while the GPU is busy with the forward pass"
_OPTION = "DEEPYTORCH_COMPILE=off"
_PLACE = "_deepytorch_early"
# Classes of these modules keep to themselves.
_SAMPLERS = (
    *("torch.utils.data.sampler", "torch.utils.data.distributed"),
    *("accelerate.data_loader", "transformers.trainer_pt_utils"),
)
_COLLATES = (
    *("transformers.data.data_collator", "trl.trainer.sft_trainer"),
    *("trl.trainer.dpo_trainer", "trl.trainer.reward_trainer"),
)


class _Running(threading.local):
    last: weakref.ref[Any] | None = None
    """The iterator that was asked for a batch last, in this thread."""


_running = _Running()


def install(changes: contract.Changes) -> None:
    """Have torch's loaders without workers load so, from now on."""
    from torch.utils.data import dataloader

    iterator: Any = dataloader._SingleProcessDataLoaderIter
    changes.replace(iterator, "_next_data", _asked, why=_WHY, option=_OPTION)
    changes.on_undo(beside.add(load_next))


def load_next() -> None:
    """Load the next batch of the loader that gave the last one, if that may be."""
    iterator = _running.last() if _running.last is not None else None
    if iterator is None or _PLACE in vars(iterator) or not _may_load(iterator):
        return
    early = _Early(iterator, original_of(type(iterator)._next_data))
    vars(iterator)[_PLACE] = early
    early.plan()


def _asked(original: Callable[..., Any]) -> Callable[..., Any]:
    def _next_data(iterator: Any) -> Any:
        _running.last = weakref.ref(iterator)
        early: _Early | None = vars(iterator).pop(_PLACE, None)
        return original(iterator) if early is None else early.taken(iterator, original)

    return _next_data


class _Early:
    """A batch that was loaded before it was asked for; as if nothing was drawn until it is taken.

    Args:
        iterator: a loader's.
        load: its method that loads a batch.
    """

    def __init__(self, iterator: Any, load: Callable[[Any], Any]) -> None:
        before = guard.HostNumbers()
        self._index = iterator._next_index()
        self._is_loaded = True
        self._batch: Any = None
        try:
            self._batch = _loaded(iterator, load, self._index)
        except Exception:  # it is loaded again, and raises then
            self._is_loaded = False
        after = guard.HostNumbers()
        self._drawn = None
        if before != after:
            self._drawn = before, after
            before.put_back()

    def plan(self) -> None:
        """Plan how the batch packs, if somebody packs batches."""
        # Importing it takes seconds, and who plans batches has.
        plans: Any = sys.modules.get("deepytorch.integrations.common.planned_batches")
        if self._is_loaded and plans is not None:
            plans.plan_ahead(self._batch)

    def taken(self, iterator: Any, load: Callable[[Any], Any]) -> Any:
        """The batch for who asks for it now; loaded anew if other numbers would be drawn."""
        is_same = self._is_loaded
        if is_same and self._drawn is not None:
            before, after = self._drawn
            is_same = guard.HostNumbers() == before
            if is_same:
                after.put_back()
        return self._batch if is_same else _loaded(iterator, load, self._index)


def _loaded(iterator: Any, load: Callable[[Any], Any], index: Any) -> Any:
    iterator._next_index = lambda: index
    try:
        return load(iterator)
    finally:
        del iterator._next_index


def _may_load(iterator: Any) -> bool:
    """Whether there is a next batch, and to load it before its time changes nothing else."""
    sampler = iterator._index_sampler
    if not iterator._auto_collation or iterator._num_yielded >= len(sampler):
        return False
    known: bool | None = vars(iterator).get(f"{_PLACE}_known")
    if known is None:
        known = keep_to_themselves(sampler, iterator._dataset, iterator._collate_fn)
        vars(iterator)[f"{_PLACE}_known"] = known
    return known


def keep_to_themselves(sampler: Any, data: Any, collate: Any, *, may_share: bool = False) -> bool:
    """Whether a loader of these does nothing but load, so that nobody can tell when it does.

    `may_share`: whether its sampler may draw from a generator that is not its own. It does so as it
    begins, and once more when it has no samples left.
    """
    return (
        _is_known_sampler(sampler, may_share)
        and _is_known_data(data)
        and _is_known_collate(collate)
    )


def _is_known_sampler(sampler: Any, may_share: bool) -> bool:
    if type(sampler).__module__ not in _SAMPLERS:
        return False
    if isinstance(sampler, RandomSampler):
        # One that is given a generator shares it, but for Accelerate's, which makes its own.
        is_own = sampler.generator is None or type(sampler).__name__ == "SeedableRandomSampler"
        return (is_own or may_share) and not sampler.replacement
    inner = [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
    return all(child is None or _is_known_sampler(child, may_share) for child in inner)


def _is_known_data(data: Any) -> bool:
    if type(data) is Subset:
        return _is_known_data(data.dataset)
    if type(data) is TensorDataset:
        return True
    arrow = sys.modules.get("datasets.arrow_dataset")
    return arrow is not None and type(data) is arrow.Dataset and data.format["type"] != "custom"


def _is_known_collate(collate: Any) -> bool:
    collate = getattr(collate, "collate", collate)  # ours, which plans
    if collate is default_collate:
        return True
    named = collate if hasattr(collate, "__qualname__") else type(collate)
    return named.__module__ in _COLLATES
