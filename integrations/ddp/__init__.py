"""DistributedDataParallel on deepytorch: buckets in registered memory, of measured sizes, or bf16.

Seams: DDP's Reducer, whose buckets deepytorch_core.c10d.registered places, and which is made anew
with other bucket sizes (see `buckets`); `register_comm_hook` for compression. A group that was
made before deepytorch was active is upgraded in place.

Left alone: the module, its parameters and hooks, buffers' broadcasts, no_sync, join, and everything
about DDP that its arguments say.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepytorch.integrations.common import contract, groups
from deepytorch.integrations.common.contract import Changes, IntegrationError
from deepytorch_core.base import decisions
from deepytorch_core.base.config import Options
from deepytorch_core.c10d import registered
from deepytorch_core.tune import in_force

_PREPARE = "prepare_ddp"
_TUNE = "tune_buckets"
_COMPRESSIONS = (None, "bf16")


def prepare_ddp(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    tune_buckets: bool = False,
    compress: str | None = None,
    **kwargs: Any,
) -> DistributedDataParallel:
    """Wrap a module in DistributedDataParallel whose gradients travel through deepytorch.

    Collective over the default group. On the CPU the gradient buckets lie in registered memory,
    which the other ranks of the node read and write in place. A module that this function has
    wrapped is returned as it is.

    Args:
        model: the module, on its device.
        process_group: the ranks to average over; default: all.
        tune_buckets: measure the bucket sizes in the first steps, see `tune_buckets`.
        compress: "bf16" sends float32 and float64 gradients as bfloat16: half the bytes. They
            are divided before they are rounded. On the CPU the ranks' values are added in float32
            and rounded once.
        **kwargs: DistributedDataParallel's own arguments, and
            `deepytorch_core.base.config.Options`.

    Returns the DistributedDataParallel; with enabled=False exactly torch's.

    Raises IntegrationError, on every rank, for a module that is DDP's already, a wrong argument, or
    arguments that differ between ranks or exclude each other. The same goes for a group that
    deepytorch does not serve on the module's device. DDP still refuses in its own words what it
    refuses itself.
    """
    groups.require_torch()
    if isinstance(model, DistributedDataParallel) and contract.is_marked(model, _PREPARE):
        return model
    ddp_kwargs = {name: kwargs.pop(name) for name in _ddp_keywords() if name in kwargs}

    def check() -> dict[str, Any]:
        _check_arguments(model, tune_buckets, compress, ddp_kwargs)
        return {"tune_buckets": tune_buckets, "compress": compress}

    joined = contract.join(_PREPARE, kwargs, own=check)
    if process_group is not None:
        ddp_kwargs["process_group"] = process_group
    if not joined.options.enabled:
        return DistributedDataParallel(model, **ddp_kwargs)
    try:
        groups.require_served(_PREPARE, _group_of(ddp_kwargs), _device_of(model), joined.options)
        with _placed(model, joined.options):
            ddp = DistributedDataParallel(model, **ddp_kwargs)
        changes = Changes()
        if compress is not None:
            _compress(ddp, changes)
        if tune_buckets:
            _tune(ddp, joined.options, Changes())
    except BaseException:
        joined.leave()
        raise
    changes.on_undo(joined.leave)
    contract.mark(ddp, _PREPARE, changes)
    return ddp


def tune_buckets(ddp: DistributedDataParallel, **options: Any) -> None:
    """Measure DDP's bucket size and first bucket's size in the next steps; keep what is faster.

    Collective over the default group. Each candidate trains eight steps; the sizes that the module
    came with stay unless another is faster beyond the noise, twice. All ranks decide together. One
    line tells the result, and `deepytorch.report().decisions` has it with the times. With tune=off,
    or deterministic, nothing is measured. On the CPU results don't depend on the sizes, but for the
    last bit in one case (docs/ddp.md). A second call does nothing.

    Args:
        ddp: any DistributedDataParallel, between two steps.
        **options: `deepytorch_core.base.config.Options`.

    Raises IntegrationError, on every rank, for another module, one whose buckets can't be changed,
    or a wrong option. The same goes for a group that deepytorch does not serve on the module's
    device.
    """
    groups.require_torch()
    if isinstance(ddp, DistributedDataParallel) and contract.is_marked(ddp, _TUNE):
        return

    def check() -> dict[str, Any]:
        if not isinstance(ddp, DistributedDataParallel):
            raise IntegrationError(
                f"{_TUNE}: {type(ddp).__name__} is no DistributedDataParallel: pass what "
                "prepare_ddp returned"
            )
        return {}

    joined = contract.join(_TUNE, options, own=check)
    if not joined.options.enabled:
        return
    changes = Changes()
    try:
        groups.require_served(_TUNE, ddp.process_group, ddp.device, joined.options)
        _tune(ddp, joined.options, changes)
    except IntegrationError:
        joined.leave()
        raise
    changes.on_undo(joined.leave)


def undo(ddp: DistributedDataParallel) -> bool:
    """Take back what `prepare_ddp` and `tune_buckets` did, between two steps, on every rank.

    The module stays DistributedDataParallel's, with the bucket sizes that it was made with and
    without compression. Returns False when there was nothing to undo.
    """
    undone = [contract.undo(ddp, adapter) for adapter in (_TUNE, _PREPARE)]
    return any(undone)


def _check_arguments(
    model: Any, tune_buckets: Any, compress: Any, ddp_kwargs: Mapping[str, Any]
) -> None:
    if isinstance(model, DistributedDataParallel):
        raise IntegrationError(
            f"{_PREPARE}: the module is DistributedDataParallel's already: pass the one inside, "
            "or use tune_buckets(ddp)"
        )
    if not isinstance(model, nn.Module):
        raise IntegrationError(f"{_PREPARE}: {type(model).__name__} is no torch.nn.Module")
    if not isinstance(tune_buckets, bool):
        raise IntegrationError(f"{_PREPARE}: tune_buckets={tune_buckets!r}: expected True or False")
    if compress not in _COMPRESSIONS:
        raise IntegrationError(f"{_PREPARE}: compress={compress!r}: expected one of None, 'bf16'")
    if tune_buckets and ddp_kwargs.get("bucket_cap_mb_list"):
        raise IntegrationError(
            f"{_PREPARE}: bucket_cap_mb_list gives every bucket its size: leave it or "
            "tune_buckets away"
        )


def _ddp_keywords() -> list[str]:
    """Return the names that DistributedDataParallel takes besides the module; none is ours."""
    names = list(inspect.signature(DistributedDataParallel.__init__).parameters)
    return [name for name in names if name not in {"self", "module", "process_group"}]


def _group_of(ddp_kwargs: Mapping[str, Any]) -> Any:
    group, mesh = ddp_kwargs.get("process_group"), ddp_kwargs.get("device_mesh")
    if group is None and mesh is not None:
        group = mesh.get_group()
    return group or dist.group.WORLD


def _device_of(model: nn.Module) -> torch.device:
    """Return where the module is; DDP itself refuses one without parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _placed(model: nn.Module, options: Options) -> contextlib.AbstractContextManager[None]:
    if options.collectives == "stock" or _device_of(model).type != "cpu":
        return contextlib.nullcontext()
    return registered.place_ddp_buckets()


def _compress(ddp: DistributedDataParallel, changes: Changes) -> None:
    from . import bucket_hook, buckets

    reason = buckets.why_fixed(ddp)
    if reason is not None:
        raise IntegrationError(f"{_PREPARE}: compress can't be used with this module: {reason}")
    hook, group = bucket_hook.average_as_bf16, ddp.process_group
    parameters = buckets.reduced_parameters(ddp)
    ddp.register_comm_hook(group, hook)

    def take_out() -> None:
        ddp._comm_hooks.remove((hook, group))
        buckets.rebuild(ddp, parameters)

    changes.on_undo(take_out)


def _tune(ddp: DistributedDataParallel, options: Options, changes: Changes) -> None:
    """Start measuring, if the options let it; `changes` undoes it."""
    from . import bucket_tuning, buckets

    reason = buckets.why_fixed(ddp)
    if reason is None and getattr(ddp, "bucket_bytes_cap_list", None):
        reason = "bucket_cap_mb_list gives every bucket its size"
    if reason is not None:
        raise IntegrationError(f"{_TUNE}: this module's buckets can't be changed: {reason}")
    contract.mark(ddp, _TUNE, changes)
    base = buckets.layout_of(ddp)
    gradient_bytes = buckets.num_bytes(buckets.reduced_parameters(ddp))
    layouts = bucket_tuning.candidates(gradient_bytes, base)
    in_force.leave("ddp_bucket_mb", "the script measures bucket sizes itself, by tune_buckets")
    why_not = None
    if options.tune == "off" or options.deterministic:
        why_not = "tune=off" if options.tune == "off" else "deterministic"
    elif dist.get_world_size(ddp.process_group) == 1:
        why_not = "one rank"
    elif ddp._join_config.enable:
        why_not = "ranks in a join context may have different numbers of steps"
    elif not layouts:
        why_not = "the gradients fit one bucket"
    if why_not is not None:
        decisions.record(bucket_tuning.WHAT, str(base), f"not measured: {why_not}")
        return
    tuning = bucket_tuning.BucketTuning(ddp, layouts)
    changes.on_undo(lambda: tuning.undo(ddp))
