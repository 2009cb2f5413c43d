"""DeepSpeed: a section in its JSON, or one other `initialize`.

`{"deepytorch": {"enabled": true, ...options}}` in DeepSpeed's configuration sends the engine's
collectives through deepytorch; the script stays as it is. `initialize` here does the same from
Python. The section's names are the options of `deepytorch_core.config.Options`.

Seam replaced: `deepspeed.initialize`, wrapped when deepspeed is imported
(`deepytorch_core.deepspeed_flag`). Without the section the wrapper only passes the call on. With it
the process groups that exist are upgraded in place, and bucket sizes that the configuration leaves
open are filled in (`_deepspeed_buckets`). Left alone: engines, optimizers, ZeRO's own code,
checkpoints, launchers, the accelerator object. Nothing of ours runs in a step but collectives.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

from deepytorch_core import activation, config, deepspeed_flag
from deepytorch_core.config import Options
from deepytorch_core.deepspeed_flag import IN_ARGS, SECTION
from deepytorch_core.patching import original_of

from ._contract import Joined, join, require
from ._deepspeed_buckets import fill_bucket_sizes

VERSIONS = ">=0.17,<0.20"
TESTED = "0.19.8"

_NAME = "deepspeed"

_joined: list[Joined] = []


def initialize(
    *args: Any, deepytorch: Mapping[str, Any] | bool | None = None, **kwargs: Any
) -> tuple[Any, ...]:
    """`deepspeed.initialize` on deepytorch: the same arguments, the same four results.

    Collective: every rank calls it. It initialises torch.distributed if nobody has, as DeepSpeed
    does.

    Args:
        deepytorch: options by name (see `deepytorch_core.config.Options`), which win over those in
            the section "deepytorch" of the configuration; True or None for none, False for stock
            DeepSpeed.

    Raises IntegrationError, the same on every rank, for an unknown option, a wrong value, options
    that differ between ranks, a version of DeepSpeed that is not known, or process groups that
    can't be upgraded.
    """
    given = dict(deepytorch) if isinstance(deepytorch, Mapping) else {}
    if isinstance(deepytorch, bool):
        given["enabled"] = deepytorch
    return _initialize(original_of(deepspeed.initialize), args, kwargs, given)


def run_flagged(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Take over a call of `deepspeed.initialize` whose configuration may have our section."""
    call = inspect.signature(original).bind(*args, **kwargs)
    source = _configuration(call.arguments)
    if source is None or SECTION not in source:
        result: tuple[Any, ...] = original(*args, **kwargs)
        return result
    return _initialize(original, args, kwargs, {})


def undo() -> None:
    """Give DeepSpeed its `initialize` back, and the process groups their former backends.

    Engines go on with those. From then on a section in a configuration has no effect, until
    `deepytorch.activate()`. Does nothing when there is nothing to undo.
    """
    deepspeed_flag.disarm()
    while _joined:
        _joined.pop().leave()


def _initialize(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: dict[str, Any],
) -> tuple[Any, ...]:
    call = inspect.signature(original).bind(*args, **kwargs)
    result: tuple[Any, ...]
    if deepspeed_flag.switched_off():
        result = original(*args, **kwargs)
        return result
    require(_NAME, VERSIONS, tested=TESTED)
    source = _configuration(call.arguments)
    options = {**_section(source), **given}
    _connect(call, options)
    joined = join(_NAME, options)
    if not joined.options.enabled:
        result = original(*args, **kwargs)
        return result
    _joined.append(joined)
    model = call.arguments.get("model")
    if source is not None and model is not None:
        device = torch.device(get_accelerator().current_device_name())
        filled = fill_bucket_sizes(source, model, joined.options, device)
        with _configured(call, filled):
            result = original(*call.args, **call.kwargs)
        return result
    result = original(*args, **kwargs)
    return result


def _configuration(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """What DeepSpeed will take as its configuration, read the way it does; None if nothing."""
    in_args = [getattr(given.get("args"), name, None) for name in IN_ARGS]
    for source in (given.get("config"), given.get("config_params"), *in_args):
        if source is None:
            continue
        if isinstance(source, dict):
            return source
        if os.path.exists(source):
            with open(source) as file:
                text = file.read()
        else:
            text = base64.urlsafe_b64decode(source).decode()
        parser = importlib.import_module("hjson")
        read: dict[str, Any] = parser.loads(
            text, object_pairs_hook=dict_raise_error_on_duplicate_keys
        )
        return read
    return None


def _section(source: Mapping[str, Any] | None) -> dict[str, Any]:
    section = (source or {}).get(SECTION, {})
    # What is no mapping can only be meant as the switch; if it is no switch either, the ranks
    # are told so together, by `join`.
    return dict(section) if isinstance(section, Mapping) else {"enabled": section}


def _connect(call: inspect.BoundArguments, options: Mapping[str, Any]) -> None:
    """Initialise torch.distributed as DeepSpeed is about to do, so that ranks can agree."""
    if activation.is_active() and not dist.is_initialized():
        # The default group is about to be made with ours: let it have the options.
        with contextlib.suppress(ValueError):  # `join` tells all ranks
            chosen = Options.from_mapping(options, base=config.current())
            if chosen.enabled:
                activation.put_in_force(chosen)
    # These two arguments have a default in every version known here.
    defaults = {name: parameter.default for name, parameter in call.signature.parameters.items()}
    comm.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        **{
            name: call.arguments.get(name, defaults[name])
            for name in ("distributed_port", "dist_init_required")
        },
    )


@contextlib.contextmanager
def _configured(call: inspect.BoundArguments, filled: dict[str, Any]) -> Iterator[None]:
    """While open, the call carries `filled` wherever it carries its configuration."""
    args = call.arguments.get("args")
    for name in ("config", "config_params"):
        if call.arguments.get(name) is not None:
            call.arguments[name] = filled
            yield
            return
    # DeepSpeed writes to this object, so it has to be this one.
    name = next(name for name in IN_ARGS if getattr(args, name, None) is not None)
    before = getattr(args, name)
    setattr(args, name, filled)
    try:
        yield
    finally:
        for other in IN_ARGS:  # DeepSpeed moves the one under its old name to the new one
            if getattr(args, other, None) is filled:
                setattr(args, other, before)
