"""DeepSpeed: a section in its JSON, or one other `initialize`.

`{"deepytorch": {"enabled": true, ...options}}` in DeepSpeed's configuration sends the engine's
collectives through deepytorch; the script stays as it is. `initialize` here does the same from
Python. The section's names are the options of `deepytorch_core.base.config.Options`.

Seam replaced: `deepspeed.initialize`, wrapped when deepspeed is imported
(`deepytorch_core.c10d.deepspeed_flag`). Without the section the wrapper passes the call on, unless
other ranks have it: then all have an error. With it the process groups that exist are upgraded in
place, and bucket sizes that the configuration leaves open are filled in (`buckets`). An engine's
transformers model trains without padding (`padding_free`, by hooks), and fused kernels go into the
model (`kernels`). The model is compiled as option `compile` says; under ZeRO-3, its leaf modules
are. Where ZeRO-3 keeps weights or the optimizer on the host, updated weights are copied another way
(`offloaded_weights`). DeepSpeed's monitor, where one is configured, also writes figures of
deepytorch's (`live`). Left alone: the rest of ZeRO's code, checkpoints, launchers, the accelerator
object.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deepytorch.integrations.common import claims
from deepytorch.integrations.common.contract import Changes, Joined, join, require
from deepytorch.integrations.seams import deepspeed_engine
from deepytorch.integrations.seams.deepspeed_engine import NAME as _NAME
from deepytorch.integrations.seams.deepspeed_engine import TESTED, VERSIONS
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.base.patching import original_of
from deepytorch_core.c10d import activation, deepspeed_flag
from deepytorch_core.c10d.deepspeed_flag import IN_ARGS, SECTION

from .buckets import fill_bucket_sizes

_joined: list[Joined] = []
_changes = Changes()


def initialize(
    *args: Any, deepytorch: Mapping[str, Any] | bool | None = None, **kwargs: Any
) -> tuple[Any, ...]:
    """`deepspeed.initialize` on deepytorch: the same arguments, the same four results.

    Collective: every rank calls it. It initialises torch.distributed if nobody has, as DeepSpeed
    does.

    Args:
        deepytorch: options by name (see `deepytorch_core.base.config.Options`), which win over
            those in the section "deepytorch" of the configuration;
            True or None for none, False for stock DeepSpeed.

    Raises IntegrationError, the same on every rank, for an unknown option, a wrong value, or
    options that differ between ranks. The same goes for a version of DeepSpeed that is not known,
    and for process groups that can't be upgraded.
    """
    if not deepspeed_flag.switched_off():
        require(_NAME, VERSIONS, tested=TESTED)
    import deepspeed

    given = dict(deepytorch) if isinstance(deepytorch, Mapping) else {}
    if isinstance(deepytorch, bool):
        given["enabled"] = deepytorch
    return _initialize(original_of(deepspeed.initialize), args, kwargs, given)


def run_flagged(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Take over a call of `deepspeed.initialize` whose configuration may have our section."""
    require(_NAME, VERSIONS, tested=TESTED)
    source = _configuration(inspect.signature(original).bind(*args, **kwargs).arguments)
    if source is None or SECTION not in source:
        reason = deepspeed_flag.NO_SECTION
        result: tuple[Any, ...] = deepspeed_flag.without_adapter(original, args, kwargs, reason)
        return result
    return _initialize(original, args, kwargs, {})


def undo() -> None:
    """Give DeepSpeed its `initialize` back, and the process groups their former backends.

    Engines go on with those, and with padding. From then on a section in a configuration has no
    effect, until `deepytorch.activate()`. Does nothing when there is nothing to undo.
    """
    deepspeed_flag.disarm()
    deepspeed_engine.forget_packing()
    while _joined:
        _joined.pop().leave()
    _changes.undo()


def _initialize(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: dict[str, Any],
) -> tuple[Any, ...]:
    """`deepspeed.initialize` with deepytorch under it."""
    if deepspeed_flag.switched_off():
        reason = deepspeed_flag.IS_OFF
        stock: tuple[Any, ...] = deepspeed_flag.without_adapter(original, args, kwargs, reason)
        return stock
    call = inspect.signature(original).bind(*args, **kwargs)
    source = _configuration(call.arguments) or {}
    options = {**_section(source), **given}
    _connect(call, options)
    joined = join(_NAME, options)
    in_force = joined.options
    # Also where that is off: what the script says wins over what is on unasked.
    claims.take([call.arguments.get("model"), call.arguments.get("optimizer")], _NAME)
    with contextlib.ExitStack() as stack:
        if in_force.enabled:
            _joined.append(joined)
            stack.enter_context(_filled(call, source, in_force))
            deepspeed_engine.swap_kernels(call.arguments, in_force, _changes)
        result: tuple[Any, ...] = original(*call.args, **call.kwargs)
    if in_force.enabled:
        deepspeed_engine.attach(result, in_force, _changes)
    return result


def _configuration(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration that DeepSpeed will take, read the way it does; None if nothing."""
    places = [given.get("config"), given.get("config_params")]
    places += [getattr(given.get("args"), name, None) for name in IN_ARGS]
    source = next((place for place in places if place is not None), None)
    if source is None or isinstance(source, dict):
        return source
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    if os.path.exists(source):  # false for a text that is too long for a path, unlike Path's
        text = Path(source).read_text()
    else:
        text = base64.urlsafe_b64decode(source).decode()
    parser = importlib.import_module("hjson")  # what DeepSpeed reads its files with
    read: dict[str, Any] = parser.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    return read


def _section(source: Mapping[str, Any] | None) -> dict[str, Any]:
    section = (source or {}).get(SECTION, {})
    # A value that is no mapping can only be meant as the switch. If it is no switch either, `join`
    # tells the ranks so together.
    return dict(section) if isinstance(section, Mapping) else {"enabled": section}


def _connect(call: inspect.BoundArguments, options: Mapping[str, Any]) -> None:
    """Initialise torch.distributed as DeepSpeed is about to do, so that ranks can agree."""
    import torch.distributed as dist
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    if activation.is_active() and not dist.is_initialized():
        # The default group is about to be made with ours: let it have the options.
        with contextlib.suppress(ValueError):  # `join` tells all ranks
            chosen = Options.from_mapping(options, base=config.current())
            if chosen.enabled:
                activation.put_in_force(chosen)
    names = ("distributed_port", "dist_init_required")
    comm.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        **{name: call.arguments[name] for name in names if name in call.arguments},
    )


def _waits_for_all_producers() -> bool:
    """Whether this DeepSpeed's overlapped reduction waits for each stream that filled a bucket."""
    from deepspeed.runtime.zero import stage_1_and_2

    bucket = getattr(stage_1_and_2, "IPGBucket", None)
    return bucket is not None and hasattr(bucket(), "copy_streams")


@contextlib.contextmanager
def _filled(
    call: inspect.BoundArguments, source: dict[str, Any], options: Options
) -> Iterator[None]:
    """While open, the configuration in the call has the bucket sizes that it had left open."""
    import torch
    from deepspeed.accelerator import get_accelerator

    filled = source
    model = call.arguments.get("model")
    if model is not None:  # else DeepSpeed is about to ask for it
        device = torch.device(get_accelerator().current_device_name())
        filled = fill_bucket_sizes(
            source, model, options, device, may_overlap=_waits_for_all_producers()
        )
    if filled is source:
        yield
        return
    for name in ("config", "config_params"):
        if call.arguments.get(name) is not None:
            call.arguments[name] = filled
            yield
            return
    # Not in a copy of `args`: DeepSpeed writes to it what the script may read later.
    args = call.arguments["args"]
    before = {name: getattr(args, name) for name in IN_ARGS if hasattr(args, name)}
    for name, value in before.items():
        if value is not None:
            setattr(args, name, filled)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)
