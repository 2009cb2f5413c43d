"""Changes one `accelerate.Accelerator` for deepytorch, whoever built it.

Shared by the adapters of Accelerate and of transformers, whose Trainer builds an Accelerator. Put
in place, on that object alone:

* the process groups that exist are upgraded in place (`contract.join`);
* `log` gives the trackers some figures of deepytorch's, too (`live`);
* DeepSpeed: the flag `{"deepytorch": {...}}` is written into the DeepSpeed configuration;
* FSDP2: `prepare` also places the buffers of the sharded model in registered memory;
* loaders copy batches to the GPU beside the steps under way (`side_copies`), and load the next one
  meanwhile (`early_batches`);
* `prepare` also swaps fused kernels in (`kernels`) and has transformers models train without
  padding (`padding_free`). It compiles models as option `compile` says (`compilation`), unless
  Accelerate compiles them itself. It does all of this in a process that trains by itself too.

DDP needs nothing else: its buckets are placed wherever deepytorch serves the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from deepytorch.integrations.common import (
    around,
    claims,
    compilation,
    contract,
    live,
    moved_batches,
)
from deepytorch.integrations.kernels import apply as kernels
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.base.console import say_once
from deepytorch_core.c10d import activation

from . import early_batches, fsdp2, side_copies

_Prepare = Callable[..., Any]
_NAME = "accelerator"
_FLAG = "deepytorch"
_VERSIONS, _TESTED = ">=1.10,<2", "1.15.0"

_unasked: WeakSet[Any] = WeakSet()
_changed: list[contract.Changes] = []


def apply_unasked(accelerator: Any) -> bool:
    """Give an Accelerator whatever is each rank's own affair, as options in force say.

    This is for scripts that know nothing of it: no rank is waited for, and no tracker gets figures.
    DeepSpeed's configuration stays as it is, and what can't be done is left to stock.

    Returns whether there is anything to do.
    """
    options = config.current()
    if not options.enabled or contract.is_marked(accelerator, _NAME):
        return False

    changes = contract.Changes(asked=False)

    def do() -> None:
        contract.require("accelerate", _VERSIONS, tested=_TESTED)
        _apply_alone(accelerator, options, "accelerate", changes)

    changes.attempt("Accelerate's prepare", do)
    is_applied = contract.is_marked(accelerator, _NAME)
    if is_applied:
        _unasked.add(accelerator)
        _changed.append(changes)
    return is_applied


def undo_unasked() -> None:
    """Put back every Accelerator that nobody asked it for."""
    for accelerator in list(_unasked):
        contract.take_back_unasked(accelerator, _NAME)
    _unasked.clear()
    while _changed:  # of Accelerators that are gone: their classes and modules
        _changed.pop().undo()
    around.forget_unused()


def apply(accelerator: Any, given: Mapping[str, Any], *, adapter: str, armed: bool = False) -> bool:
    """Put deepytorch under an Accelerator, once; False if it is off or there is nothing to do.

    Collective over the default group, if there is one. Options of the DeepSpeed configuration's
    own flag are in force too; `given` wins over them.

    Args:
        accelerator: the Accelerator, its process group initialised.
        given: options by name.
        adapter: the name of the calling adapter, for messages.
        armed: whether `contract.arm` has activated deepytorch for this Accelerator.

    Raises IntegrationError as `contract.join` does, and for a flag that is no JSON object.
    """
    if config.current().enabled:
        contract.require("accelerate", _VERSIONS, tested=_TESTED)
    contract.take_back_unasked(accelerator, _NAME)
    if contract.is_marked(accelerator, _NAME):
        return True
    _warn_if_alone(accelerator, adapter)
    if not _is_initialized():
        own = contract.alone(adapter, given)
        applied = _apply_alone(accelerator, own, adapter, contract.Changes())
        if not applied:
            claims.leave_to_stock()
        if armed:
            activation.deactivate()  # there are no groups for it to serve
        return applied
    configurations = _deepspeed_configurations(accelerator)
    options = dict(given)
    for configuration in configurations:
        options = {**_flag(configuration, adapter), **options}
    joined = contract.join(adapter, options)
    if not joined.options.enabled:
        claims.leave_to_stock()
        return False
    changes = contract.Changes()
    changes.on_undo(activation.deactivate if armed else joined.leave)
    for configuration in configurations:
        _write_flag(configuration, options, changes)
    if getattr(accelerator, "is_fsdp2", False):
        changes.around(accelerator, "prepare", functools.partial(_prepare_fsdp2, changes))
    _set_policies(accelerator, joined.options, adapter, changes)
    changes.around(accelerator, "prepare", functools.partial(_preparing_taken, adapter))
    live.log_figures(accelerator, changes)
    contract.mark(accelerator, _NAME, changes)
    return True


def _preparing_taken(adapter: str, original: _Prepare, _: Any, *args: Any, **kwargs: Any) -> Any:
    claims.take(args, adapter)
    prepared = original(*args, **kwargs)
    claims.take(_each(prepared), adapter)
    return prepared


def _apply_alone(
    accelerator: Any, options: Options, adapter: str, changes: contract.Changes
) -> bool:
    """Put in place all that needs no agreement with other ranks; False if that is off."""
    if not options.enabled or not _set_policies(accelerator, options, adapter, changes):
        return False
    changes.around(accelerator, "prepare", functools.partial(_preparing_taken, adapter))
    contract.mark(accelerator, _NAME, changes)
    return True


def _set_policies(
    accelerator: Any, options: Options, adapter: str, changes: contract.Changes
) -> bool:
    """Have `prepare` apply what is not about communication; False if all of it is off."""
    is_compiled = _is_compiled_here(accelerator, options)
    if is_compiled:
        changes.around(
            accelerator, "prepare", functools.partial(_prepare_compiled, options, changes)
        )
        side_copies.install(changes)
        early_batches.install(changes)
    is_packed = options.padding_free != "off"
    if is_packed:
        packed = _preparing_packed(options.padding_free, adapter, changes)
        changes.around(accelerator, "prepare", packed)
        if isinstance(options.tokens_per_step, int):
            from . import accumulated_batches  # it imports the compiler

            accumulated_batches.install(accelerator, changes)
    is_swapped = options.kernels != "off"
    if is_swapped:  # outermost: kernels go in before anything wraps the model
        swapped = functools.partial(kernels.prepare, options, changes)
        changes.around(accelerator, "prepare", swapped)
    return is_compiled or is_packed or is_swapped


def is_applied(accelerator: Any) -> bool:
    """Whether deepytorch is under this Accelerator."""
    return contract.is_marked(accelerator, _NAME)


def undo(accelerator: Any) -> bool:
    """Put the Accelerator back as it was; False when there was nothing to undo."""
    return contract.undo(accelerator, _NAME)


def _is_initialized() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _warn_if_alone(accelerator: Any, adapter: str) -> None:
    if accelerator.distributed_type == "NO" and config.world_size() > 1:
        say_once(
            f"{adapter}: {config.world_size()} processes were launched but Accelerate trains each "
            "alone; on a machine without GPUs pass cpu=True (Trainer: use_cpu=True) or set "
            "ACCELERATE_USE_CPU=true",
            level="warning",
        )


def _deepspeed_configurations(accelerator: Any) -> list[dict[str, Any]]:
    plugins = getattr(accelerator.state, "deepspeed_plugins", None)
    if plugins is None:
        return []
    several = list(plugins.values()) if isinstance(plugins, dict) else [plugins]
    return [plugin.deepspeed_config for plugin in several]


def _flag(configuration: Mapping[str, Any], adapter: str) -> dict[str, Any]:
    flag = configuration.get(_FLAG, {})
    if not isinstance(flag, Mapping):
        raise contract.IntegrationError(
            f'{adapter}: the DeepSpeed configuration has "{_FLAG}": {flag!r}; it must be an object '
            f'of options, such as {{"{_FLAG}": {{"enabled": true}}}}'
        )
    return dict(flag)


def _write_flag(
    configuration: dict[str, Any], options: Mapping[str, Any], changes: contract.Changes
) -> None:
    if _FLAG in configuration:
        before = configuration[_FLAG]
        changes.on_undo(lambda: configuration.update({_FLAG: before}))
    else:
        changes.on_undo(lambda: configuration.pop(_FLAG, None))
    # Accelerate takes every "auto" in a DeepSpeed configuration for one that it has to fill in, and
    # fails on ours. They are in force already.
    told = {name: value for name, value in options.items() if value != "auto"}
    configuration[_FLAG] = {**told, "enabled": True}


def _prepare_fsdp2(
    changes: contract.Changes, original: _Prepare, _: Any, *args: Any, **kwargs: Any
) -> Any:
    prepared = original(*args, **kwargs)
    for thing in _each(prepared):
        fsdp2.place_buffers(thing, changes)
    return prepared


def _each(prepared: Any) -> Sequence[Any]:
    return prepared if isinstance(prepared, tuple | list) else (prepared,)


def _preparing_packed(choice: str, adapter: str, changes: contract.Changes) -> _Prepare:
    models: WeakSet[Any] = WeakSet()
    moved_batches.install(changes)

    def prepare(original: _Prepare, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.nn import Module

        prepared = original(*args, **kwargs)
        for thing in _each(prepared):
            if isinstance(thing, Module):
                models.add(thing)
                changes.attempt("padding", functools.partial(pack, accelerator, thing))
        return prepared

    def pack(accelerator: Any, model: Any) -> None:
        obstacle = _cuts_sequences(accelerator)
        if not changes.asked and choice == "auto":
            padding_free.watch(model, obstacle=obstacle)
            return
        precision = _precision(accelerator)
        padding_free.attach(
            model,
            choice,
            adapter=adapter,
            precision=precision,
            obstacle=obstacle,
            is_asked=changes.asked,
        )

    def detach() -> None:
        for model in models:
            padding_free.detach(model)

    changes.on_undo(detach)
    return prepare


def _precision(accelerator: Any) -> Any:
    import torch

    computed = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
    return computed.get(str(accelerator.mixed_precision))


def _cuts_sequences(accelerator: Any) -> str | None:
    parallel = getattr(accelerator, "parallelism_config", None)
    if any(getattr(parallel, name, False) for name in ("cp_enabled", "sp_enabled")):
        return "its sequences are cut up between ranks"
    return None


def _is_compiled_here(accelerator: Any, options: Options) -> bool:
    """Whether `prepare` is to compile: not where Accelerate does that itself."""
    dynamo = getattr(accelerator.state, "dynamo_plugin", None)
    compiles_itself = str(getattr(dynamo, "backend", "NO")).rpartition(".")[2] != "NO"
    # An engine of DeepSpeed's is compiled where it is made, by the flag.
    is_engine = bool(_deepspeed_configurations(accelerator))
    return compilation.is_wanted(options) and not compiles_itself and not is_engine


def _prepare_compiled(
    options: Options, changes: contract.Changes, original: _Prepare, *args: Any, **kwargs: Any
) -> Any:
    prepared = original(*args[1:], **kwargs)
    for thing in _each(prepared):
        changes.attempt("code", functools.partial(compilation.start, thing, options, changes))
    return prepared
