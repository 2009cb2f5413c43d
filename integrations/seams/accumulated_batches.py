"""Loops that use `accelerator.accumulate` share passes of the model, where that is asked for.

An Accelerate loader hands out one micro-batch after the other. With a number for the option
`tokens_per_step` it fetches all micro-batches of an optimizer step at the first one. So they may
share passes of the model's trunk (`merged_passes`). A loop over the loader sees what stock shows:
the same batches, and the end of the data at the last one.

A loop of one's own may look at gradients between micro-batches, which come with the last one only.
So this comes by name alone, and an Accelerator that clips before it ends it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from deepytorch.integrations.common import contract
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import merged_passes
from deepytorch_core import guard

from . import early_batches

_WHY = "micro-batches of an optimizer step share passes of the model"
_OPTION = "DEEPYTORCH_TOKENS_PER_STEP=off"
_NONE = object()

_loops: weakref.WeakKeyDictionary[Any, _Loop] = weakref.WeakKeyDictionary()  # of loaders


def install(accelerator: Any, changes: contract.Changes) -> None:
    """Have the loops of this Accelerator share passes from now on."""
    from accelerate import data_loader

    changes.replace(data_loader.DataLoaderShard, "__iter__", _iterating, why=_WHY, option=_OPTION)
    changes.around(accelerator, "accumulate", _accumulating)
    changes.around(accelerator, "clip_grad_norm_", _clipping)
    changes.around(accelerator, "clip_grad_value_", _clipping)


class _Loop:
    """A loader, and the Accelerator and model that its micro-batches are for.

    Args:
        accelerator: accumulates their gradients.
        model: the only one that is trained on them.
    """

    def __init__(self, accelerator: Any, model: Any) -> None:
        self._accelerator_of = weakref.ref(accelerator)
        self._model_of = weakref.ref(model)
        self.draws = False
        """Whether loading a batch has drawn random numbers, whose order others share."""

    def num_ahead(self, shard: Any, number: int) -> int:
        """How many micro-batches are fetched now; `number`: of the first, in the loader's order."""
        accelerator = self._accelerator_of()
        if accelerator is None or self.draws:
            return 1
        steps: int = accelerator.gradient_state.num_steps
        if accelerator.step % steps:
            return 1  # the step has begun
        most = _most_ahead(shard, number)
        return steps if most is None else max(1, min(steps, most))

    def expect(self, batches: list[Any]) -> None:
        """All micro-batches of a step are there."""
        accelerator, model = self._accelerator_of(), self._model_of()
        if accelerator is not None and model is not None:
            forward = padding_free.forward_of(model)
            merged_passes.expect(forward, batches, lambda: merged_passes.why_not_in(accelerator))

    def stop(self, problem: str) -> None:
        """Let micro-batches have passes of their own from now on."""
        model = self._model_of()
        forward = None if model is None else padding_free.forward_of(model)
        if forward is not None and forward.merged is not None and not forward.merged.is_over:
            forward.merged.stop(f"{type(forward.model).__name__}: {problem}")


def _iterating(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    def __iter__(shard: Any) -> Iterator[Any]:
        source, number = original(shard), 0
        fetched: deque[tuple[Any, bool]] = deque()  # and whether it is the last of all
        while True:
            if not fetched:
                loop = _loops.get(shard)
                most = loop.num_ahead(shard, number) if loop is not None else 1
                before = guard.HostNumbers() if loop is not None and number > 0 else None
                fetched.extend(_fetched(shard, source, most))
                if not fetched:
                    return
                if loop is not None:
                    loop.draws |= before is not None and guard.HostNumbers() != before
                    loop.expect([batch for batch, _ in fetched])
            number += 1
            batch, is_last = fetched.popleft()
            if is_last:
                shard.end_of_dataloader = True
            yield batch

    return __iter__


def _fetched(shard: Any, source: Iterator[Any], most: int) -> Iterator[tuple[Any, bool]]:
    """Up to so many batches; the loader is not yet at its end, whatever it says."""
    for _ in range(most):
        batch = next(source, _NONE)
        if batch is _NONE:
            return
        is_last = bool(shard.end_of_dataloader)
        shard.end_of_dataloader = False
        yield batch, is_last
        if is_last:
            return


def _most_ahead(shard: Any, number: int) -> int | None:
    """How many batches may be fetched at once, so that nobody can tell when they are loaded.

    None: any number.
    """
    loader = shard.base_dataloader
    if getattr(shard, "use_stateful_dataloader", False) or loader.batch_sampler is None:
        return 1
    parts = loader.batch_sampler, loader.dataset, loader.collate_fn
    # Processes of its own load ahead in any case.
    if loader.num_workers > 0 or early_batches.keep_to_themselves(*parts):
        return None
    if early_batches.keep_to_themselves(*parts, may_share=True):
        return int(len(loader.batch_sampler) - shard.skip_batches - number - 1)
    return 1


def _accumulating(
    original: Callable[..., AbstractContextManager[None]], accelerator: Any, *models: Any
) -> AbstractContextManager[None]:
    shard = accelerator.gradient_state.active_dataloader
    if shard is not None and len(models) == 1 and shard not in _loops:
        _loops[shard] = _Loop(accelerator, models[0])
    return original(*models)


def _clipping(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Clip what stock clips: before the last micro-batch, too."""
    if not accelerator.sync_gradients:
        shard = accelerator.gradient_state.active_dataloader
        loop = _loops.get(shard) if shard is not None else None
        if loop is not None:
            loop.stop("its gradients are clipped between micro-batches")
    return original(*args, **kwargs)
