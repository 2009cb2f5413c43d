"""FSDP1's gradient reduction and FSDP2's communication buffers, on deepytorch.

Seams: `FullyShardedDataParallel.register_comm_hook` (FSDP1), and
`FSDPModule.set_allocate_memory_from_process_group_for_comm` (FSDP2), which has FSDP2 take the
buffers of its all_gather and reduce_scatter from the process group's backend. Groups that were
made before deepytorch was active are upgraded in place.

Left alone: sharding, prefetching, mixed precision, offload, state dicts, and parameters' own
memory. FSDP1 all-gathers its parameters as ever. FSDP2's buffers on accelerators stay torch's own
unless collectives=native asks for registered memory of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepytorch.integrations.common import contract
from deepytorch.integrations.common import groups as _groups
from deepytorch.integrations.common.contract import Changes, IntegrationError
from deepytorch_core.base import decisions
from deepytorch_core.c10d import device_memory

_HOOK = "register_comm_hook"
_APPLY = "apply_fsdp2"
_COMPRESSIONS = (None, "bf16")
_FULL_PRECISION = (torch.float32, torch.float64)


def register_comm_hook(model: nn.Module, *, compress: str | None = None, **options: Any) -> None:
    """Have an FSDP1 model's gradients reduced through registered memory, with stock's results.

    Collective over the default group. For FULL_SHARD, SHARD_GRAD_OP and NO_SHARD. A second call
    with the same `compress` does nothing.

    Args:
        model: the root FullyShardedDataParallel.
        compress: "bf16" sends float32 and float64 gradients as bfloat16: half the bytes. They
            are divided before they are rounded. On the CPU the ranks' values are added in float32
            and rounded once.
        **options: `deepytorch_core.base.config.Options`.

    Raises IntegrationError, on every rank, for a model that is not FSDP1's or not the root. Raises
    it also for a hybrid strategy, another hook, a wrong option, or a group that deepytorch does not
    serve.
    """
    _groups.require_torch()
    root: Any = model
    if contract.is_marked(model, _HOOK):
        if vars(model)["_deepytorch_compress"] != compress:
            raise IntegrationError(
                f"{_HOOK}: called before with another compress: call undo(model) first"
            )
        return

    def check() -> dict[str, Any]:
        if compress not in _COMPRESSIONS:
            raise IntegrationError(f"{_HOOK}: compress={compress!r}: expected one of None, 'bf16'")
        _fsdp1_units(root)
        return {"compress": compress}

    joined = contract.join(_HOOK, options, own=check)
    if not joined.options.enabled:
        return
    units = _fsdp1_units(root)
    try:
        for unit in units:
            device = torch.device(unit.compute_device)
            _groups.require_served(_HOOK, unit.process_group, device, joined.options)
    except IntegrationError:
        joined.leave()
        raise
    changes = Changes()
    changes.on_undo(joined.leave)
    changes.set(root, "_deepytorch_compress", compress)
    buffers: _Buffers = {}
    for unit in units:
        if compress is None and torch.device(unit.compute_device).type != "cpu":
            continue  # a hook could only repeat what FSDP1 does there by itself
        # These are set as by register_comm_hook, which would give all units one state. Here each
        # unit has its own group and factors.
        changes.set(unit, "_comm_hook", _reduce)
        changes.set(unit, "_comm_hook_state", _Reduction.of(unit, compress, buffers))
    contract.mark(model, _HOOK, changes)


def apply_fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    """Give the modules that `fully_shard` was applied to their communication buffers.

    Collective over the default group. On the CPU the buffers lie in registered memory, which the
    other ranks of the node read in place. During the first training steps they are measured
    against ordinary ones, and stay only if they are not slower; the ranks of the mesh decide
    together. With tune=off, or deterministic, registered memory is taken at once. On GPUs it is
    taken with collectives=native alone, unmeasured, in jobs of one node. Results are the same
    bits either way. A second call does nothing.

    Args:
        model: a module that `fully_shard` was applied to, itself or modules in it; compiled or
            not.
        **options: `deepytorch_core.base.config.Options`.

    Returns the model.

    Raises IntegrationError, on every rank, for a model that is not FSDP2's, or for communication of
    the user's own. Raises it also for a wrong option, or a mesh whose groups deepytorch does not
    serve.
    """
    _groups.require_torch()
    # A compiled model holds the one that was compiled.
    inner: nn.Module = getattr(model, "_orig_mod", model)
    if contract.is_marked(inner, _APPLY):
        return model

    def check() -> dict[str, Any]:
        _fsdp2_units(inner)
        return {}  # pipeline stages have models of their own

    joined = contract.join(_APPLY, options, own=check)
    if not joined.options.enabled:
        return model
    modules, units = _fsdp2_units(inner)
    try:
        for unit in units:
            for group in _groups_of(unit):
                _groups.require_served(_APPLY, group, unit.device, joined.options)
    except IntegrationError:
        joined.leave()
        raise
    changes = Changes()
    changes.on_undo(joined.leave)
    for unit in units:
        changes.set(unit, "_all_gather_comm", unit._all_gather_comm)
        changes.set(unit, "_reduce_scatter_comm", unit._reduce_scatter_comm)
    _choose_buffers(modules, units, joined.options)
    contract.mark(inner, _APPLY, changes)
    return model


def undo(model: nn.Module) -> bool:
    """Take back what `register_comm_hook` or `apply_fsdp2` did; False when that was nothing."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    undone = [contract.undo(inner, adapter) for adapter in (_HOOK, _APPLY)]
    return any(undone)


# FSDP1.

_Buffers = dict[tuple[str, int, torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class _Reduction:
    """The facts that one FSDP unit's reduction needs; kept as its hook's state."""

    group: Any
    predivide: float
    postdivide: float
    compress: bool
    # All units share them: a reduction has ended when the next one begins.
    buffers: _Buffers

    @classmethod
    def of(cls, unit: Any, compress: str | None, buffers: _Buffers) -> _Reduction:
        return cls(
            unit.process_group,
            unit._gradient_predivide_factor,
            unit._gradient_postdivide_factor,
            compress is not None,
            buffers,
        )

    def buffer(self, use: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of the size of `like`, the same one for a use every time."""
        if like.device.type != "cpu":  # other streams may still read the last one
            return torch.empty(like.numel(), dtype=dtype, device=like.device)
        key = (use, like.numel(), dtype)
        found = self.buffers.get(key)
        if found is None:
            found = self.buffers[key] = _groups.buffer(like.numel(), like, dtype, self.group)
        return found

    def wire_dtype(self, gradient: torch.Tensor) -> torch.dtype:
        if self.compress and gradient.dtype in _FULL_PRECISION:
            return torch.bfloat16
        return gradient.dtype


def _reduce(state: _Reduction, gradient: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """Average `gradient` over the ranks: in place (NO_SHARD), or this rank's part into `shard`."""
    dtype = state.wire_dtype(gradient)
    if dtype == gradient.dtype and (shard is None or gradient.device.type != "cpu"):
        gradient.div_(state.predivide)
        sent = gradient
    else:
        # One pass divides, rounds and puts it where the other ranks can read it.
        sent = state.buffer("sent", gradient, dtype)
        torch.div(gradient, state.predivide, out=sent)
    result = gradient if shard is None else shard
    if shard is None:
        dist.all_reduce(sent, group=state.group)
        received = sent
    else:
        received = shard
        if dtype != shard.dtype:
            received = state.buffer("received", shard, dtype)
        _reduce_scatter(received, sent, group=state.group)
    if received is not result:
        result.copy_(received)
    if state.postdivide != 1:
        result.div_(state.postdivide)


# torch 2.13 has a new name for it and warns of the old one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _fsdp1_units(model: Any) -> list[Any]:
    """The states of all FSDP units of a root that a hook can be given to."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._traversal_utils import _get_fsdp_states

    kind = type(model).__name__
    if not isinstance(model, FullyShardedDataParallel):
        way_out = "wrap it in FullyShardedDataParallel first"
        if any(isinstance(module, FSDPModule) for module in _modules(model)):
            way_out = "fully_shard was applied to it, so use apply_fsdp2"
        raise IntegrationError(f"{_HOOK}: {kind} is not FSDP1's: {way_out}")
    if not model.check_is_root():
        raise IntegrationError(f"{_HOOK}: this is a part of an FSDP model: pass the root")
    units: list[Any] = _get_fsdp_states(model)
    for unit in units:
        strategy = unit.sharding_strategy.name
        if "HYBRID" in strategy:
            raise IntegrationError(
                f"{_HOOK}: FSDP1 takes no hook with {strategy}: use FSDP2's hybrid sharding, "
                "fully_shard() with a 2-D mesh, and apply_fsdp2"
            )
        if unit._comm_hook is not None:
            raise IntegrationError(
                f"{_HOOK}: the model has a hook, {_name(unit._comm_hook)}: FSDP1 takes one"
            )
    return units


# FSDP2.


def _choose_buffers(modules: list[Any], units: list[Any], options: Any) -> None:
    from .trial import RegistrationTrial

    def registered(enable: bool) -> None:
        for module in modules:
            module.set_allocate_memory_from_process_group_for_comm(enable)

    sharded = [unit for unit in units if _is_sharded_and_trained(unit)]
    if options.collectives == "stock":
        return _settle(registered, False, "collectives=stock")
    if not sharded:
        return _settle(registered, False, "nothing is trained that several ranks share")
    if any(unit.device.type != "cpu" for unit in units):
        memory = device_memory.for_groups(options)
        if memory is not None and memory.is_there():
            return _settle(registered, True, "not measured: collectives=native")
        return _settle(registered, False, "registered memory on GPUs is for collectives=native")
    if options.tune == "off" or options.deterministic:
        why = "tune=off" if options.tune == "off" else "deterministic"
        return _settle(registered, True, f"not measured: {why}")

    def decided(faster: bool, times_ms: dict[str, float]) -> None:
        reason = "ordinary ones are not faster" if faster else "faster than registered ones"
        _settle(registered, faster, reason, times_ms)

    return RegistrationTrial(sharded, _groups_of(sharded[0]), decided).start()


def _settle(
    registered: Callable[[bool], None],
    choice: bool,
    reason: str,
    times_ms: dict[str, float] | None = None,
) -> None:
    registered(choice)
    chosen = "in registered memory" if choice else "in ordinary memory"
    decisions.record("FSDP2 buffers", chosen, reason, times_ms=times_ms)


def _fsdp2_units(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The FSDP2 modules of a model, and their parameter groups."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as stock

    modules: list[Any] = [module for module in _modules(model) if isinstance(module, FSDPModule)]
    if not modules:
        way_out = "call fully_shard() on it first"
        if isinstance(model, FullyShardedDataParallel):
            way_out = "it is FSDP1's, so use register_comm_hook"
        raise IntegrationError(f"{_APPLY}: {type(model).__name__} is not FSDP2's: {way_out}")
    units = [unit for module in modules for unit in _units_of(module._get_fsdp_state())]
    known = (
        stock.DefaultAllGather,
        stock.DefaultReduceScatter,
        stock.ProcessGroupAllocAllGather,
        stock.ProcessGroupAllocReduceScatter,
    )
    for unit in units:
        for communication in (unit._all_gather_comm, unit._reduce_scatter_comm):
            if not isinstance(communication, known):
                raise IntegrationError(
                    f"{_APPLY}: the model has communication of its own, "
                    f"{type(communication).__name__}: use one or the other"
                )
    return modules, units


def _units_of(state: Any) -> list[Any]:
    """A module's parameter groups: torch before 2.13 has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _is_sharded_and_trained(unit: Any) -> bool:
    is_trained = any(param.sharded_param.requires_grad for param in unit.fsdp_params)
    return is_trained and unit._all_gather_process_group.size() > 1


def _groups_of(unit: Any) -> list[Any]:
    """The process groups of a unit's mesh: the sharding one, and with HSDP the replicating one."""
    groups = [unit._all_gather_process_group]
    return [*groups, unit._all_reduce_process_group] if unit._is_hsdp else groups


def _modules(model: Any) -> list[nn.Module]:
    return list(model.modules()) if isinstance(model, nn.Module) else []


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)
