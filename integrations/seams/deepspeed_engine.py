"""Changes a model before DeepSpeed has it, and the engine that DeepSpeed makes.

For the adapter, and for scripts that know nothing of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from deepytorch.integrations.common import claims, compilation, live
from deepytorch.integrations.common.contract import Changes, require
from deepytorch.integrations.kernels import apply as kernels
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.c10d import deepspeed_flag

from . import offloaded_weights

NAME = "deepspeed"
VERSIONS = ">=0.17,<0.20"
TESTED = "0.19.8"

_packed: WeakSet[Any] = WeakSet()
_unasked: list[Changes] = []


def initialize_unasked(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`deepspeed.initialize`, and whatever of ours is each rank's own affair.

    No rank is waited for, DeepSpeed's configuration stays as it is, and what can't be done is left
    to stock.

    Args:
        original: `deepspeed.initialize`.
        args, kwargs: its arguments, with no section of ours in the configuration.
    """
    options, changes = config.current(), Changes(asked=False)
    given: dict[str, Any] = {}

    def prepare() -> None:
        require(NAME, VERSIONS, tested=TESTED)
        given.update(inspect.signature(original).bind(*args, **kwargs).arguments)

    changes.attempt("DeepSpeed's engine", prepare)
    if given:
        claims.take([given.get("model"), given.get("optimizer")], NAME)
        swap = functools.partial(swap_kernels, given, options, changes)
        changes.attempt("kernels", swap)
    reason = deepspeed_flag.NO_SECTION
    result = deepspeed_flag.without_adapter(original, args, kwargs, reason)
    if given:
        changes.attempt("DeepSpeed's engine", lambda: attach(result, options, changes))
    _unasked.append(changes)
    return result


def undo_unasked() -> None:
    """Take back what was done to engines that nobody asked it for."""
    while _unasked:
        _unasked.pop().undo()
    forget_packing()


def forget_packing() -> None:
    """Have all engines train with padding."""
    while _packed:
        padding_free.detach(_packed.pop())


def swap_kernels(given: Mapping[str, Any], options: Options, changes: Changes) -> None:
    """Swap kernels in for what `deepspeed.initialize` is given."""
    import torch
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().current_device_name())
    things = [given.get("model"), given.get("optimizer")]
    kernels.apply(things, options, changes, device=device)


def attach(result: tuple[Any, ...], options: Options, changes: Changes) -> None:
    """Do what is done to an engine: `result` is what `deepspeed.initialize` has returned."""
    engine, optimizer, loader, *_ = result
    claims.take([engine, optimizer, getattr(engine, "basic_optimizer", None)], NAME)
    offloaded_weights.attach(getattr(engine, "optimizer", None), changes)
    compilation.start(engine, options, changes)
    if changes.asked:
        live.write_figures(getattr(engine, "monitor", None), changes)
    elif options.padding_free == "auto":
        padding_free.watch(engine)
        _packed.add(engine)
        return
    loaders = [] if loader is None else [loader]
    if padding_free.attach(
        engine, options.padding_free, adapter=NAME, loaders=loaders, is_asked=changes.asked
    ):
        _packed.add(engine)
