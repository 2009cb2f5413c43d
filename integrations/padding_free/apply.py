"""Training without padding, for transformers models under any framework (option `padding_free`).

`attach` looks at one model and puts hooks on it if a packed row gives what the
padded batch gives (`packing_probe`, `packed_forward`). Data loaders given to it plan the packing
of their batches on the CPU; a batch that comes from elsewhere is planned in the forward pass.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from deepytorch.integrations.common import contract
from deepytorch_core import guard
from deepytorch_core.base import by_name, compiler_import, decisions
from deepytorch_core.base.agreement import agree, numbered
from deepytorch_core.base.console import say_once

if TYPE_CHECKING:
    from .packed_forward import Conventions, PackedForward

_NAME = "padding_free"
_WHAT = "padding-free"

# Packed rows of replayed passes have so many sizes: each is a graph more, fewer fill up more.
_NUM_SIZES = 12


def attach(
    prepared: Any,
    choice: str,
    *,
    adapter: str,
    loaders: Iterable[Any] = (),
    precision: torch.dtype | None = None,
    obstacle: str | None = None,
    is_asked: bool = True,
) -> bool:
    """Train a model without padding if that changes nothing but the time; False if it can't be.

    The choice is this rank's own but for a sharded model, whose parameters its ranks gather to try
    it: then it is collective over the default group. A model that has it already keeps it.

    Args:
        prepared: the model, in whatever its framework wraps it in, on its device.
        choice: option `padding_free`: auto, on, off.
        adapter: the caller's name, for messages.
        loaders: data loaders whose batches the model is to get.
        precision: the least precise dtype that the model computes in; None for its parameters'.
        obstacle: why the caller knows that it can't be, the same on all ranks.
        is_asked: whether a script wants it by name, so that what came unasked goes.

    Raises IntegrationError, on every rank, when `choice` is "on" and the model can't.
    """
    outer, model = _found(prepared)
    if outer is not None and is_asked:
        contract.take_back_unasked(outer, _NAME)
    if choice == "off":
        return False
    if outer is None:
        if choice == "on":
            raise contract.IntegrationError(_refusal(adapter, "there is no transformers model"))
        return False
    if not contract.is_marked(outer, _NAME):
        found: list[Conventions] = []
        reason = obstacle
        if reason is None and (choice == "on" or _is_sharded(prepared)):
            reason = agreed(_NAME, lambda: _why_not(prepared, found, precision))
        elif reason is None:
            reason = _why_not(prepared, found, precision)
        name = type(model).__name__
        if reason is not None:
            if choice == "on":
                raise contract.IntegrationError(_refusal(adapter, f"{name}: {reason}"))
            decisions.record(_WHAT, "padded", f"{name}: {reason}")
            say_once(f"{_WHAT}: {name} keeps its padding: {reason}")
            return False
        attached = _Attached()
        attached.install(outer, model, found[0], strict=choice == "on")
        attached.asked = is_asked
        contract.mark(outer, _NAME, attached)
        decisions.record(_WHAT, "packed", f"{name} gives the same logits and loss without padding")
    plan_batches(prepared, loaders)
    return True


def watch(prepared: Any, *, obstacle: str | None = None) -> None:
    """Train a model without padding from some step on, if its first steps show nothing against it.

    For programs that know nothing of it: nobody waits, no pass is added, nothing is raised. A model
    that trains so already, and what is no transformers model, is left alone.

    Args:
        prepared: the model, in whatever its framework wraps it in, on its device.
        obstacle: why the caller knows that it can't be.
    """
    outer, model = _found(prepared)
    if outer is None or contract.is_marked(outer, _NAME):
        return
    if by_name.is_noted(prepared, by_name.PADDING_FREE):
        return
    compiler_import.load()
    if obstacle is None:
        obstacle = _why_not_watched(outer)
    if obstacle is not None:
        decisions.record(_WHAT, "padded", f"{type(model).__name__}: {obstacle}")
        return
    from .packing_watch import PackingWatch

    attached = _Attached()
    attached.asked = False
    is_whole = not _is_sharded(prepared)

    def switch(watched: Any, model: Any, found: Conventions) -> None:
        attached.install(watched, model, found, is_asked=False, is_whole=is_whole)

    attached.on_undo(PackingWatch(outer, model, switch).close)
    contract.mark(outer, _NAME, attached)


def _why_not_watched(outer: Any) -> str | None:
    try:
        from . import packing_probe as packing_probe
    except ImportError as error:
        return f"this version of transformers has no attention interface ({error})"
    if not any(parameter.requires_grad for parameter in outer.parameters()):
        return "nothing of it is trained"
    return None


def plan_batches(prepared: Any, loaders: Iterable[Any]) -> None:
    """Have data loaders plan the packing of their batches for a model that `attach` has changed."""
    attached = _attachment(prepared)
    if attached is None or attached.forward is None or attached.forward.conventions.of_trunk:
        return  # a trunk alone isn't called with the loader's batch
    from .packed_forward import PlanningCollate

    for loader in loaders:
        if type(loader).__name__ == "DataLoaderDispatcher":
            continue  # Accelerate cuts its batches up, for which a plan is of no use
        # Accelerate's and DeepSpeed's loaders hold the one that collates.
        for name in ("base_dataloader", "dataloader"):
            loader = getattr(loader, name, None) or loader
        collate = getattr(loader, "collate_fn", None)
        if collate is not None and not isinstance(collate, PlanningCollate):
            attached.planning[loader] = collate
            assert attached.forward is not None
            shifted = attached.forward.conventions.shifted
            loader.collate_fn = PlanningCollate(collate, shifted)


def conventions(prepared: Any) -> Conventions | None:
    """How a model that `attach` has changed counts; None for any other."""
    forward = forward_of(prepared)
    return None if forward is None else forward.conventions


def forward_of(prepared: Any) -> PackedForward | None:
    """The hooks of a model that trains packed; None for any other."""
    attached = _attachment(prepared)
    return None if attached is None else attached.forward


def use_few_shapes(prepared: Any, limit: int, *, max_length: int) -> bool:
    """Fill packed rows up to at most `limit` sizes, as CUDA graphs and static shapes need it.

    Args:
        prepared: a model that `attach` has changed; else nothing happens, which returns False.
        limit: most sizes; see `deepytorch_core.data.Shapes`.
        max_length: tokens that no sequence exceeds.
    """
    attached = _attachment(prepared)
    if attached is not None and attached.forward is not None:
        from deepytorch_core.data import Shapes

        attached.forward.shapes = Shapes(limit, max_length=max_length)
    return attached is not None


def detach(prepared: Any) -> bool:
    """Undo `attach`, its loaders included; False when there was nothing to undo."""
    outer, _ = _found(prepared)
    return outer is not None and contract.undo(outer, _NAME)


class _Attached(contract.Changes):
    """Changes that `attach` made to one model and, weakly, to the loaders that plan for it."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: PackedForward | None = None
        # A Trainer makes a loader for every evaluation: none is kept.
        self.planning: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.on_undo(self._stop_planning)

    def install(self, outer: Any, model: Any, found: Conventions, **how: bool) -> None:
        """Have the model train packed; `how` as `PackedForward` takes it."""
        from deepytorch_core.compile import capture, undecided

        from . import fused_head
        from .packed_forward import PackedForward
        from .packed_trunk import PackedTrunk

        if found.of_trunk:
            self.forward = PackedTrunk(model, found, strict=how.get("strict", False))
            self.on_undo(self.forward.install(model))
        else:
            self.forward = PackedForward(model, outer, found, **how)
            self.on_undo(self.forward.install(outer))
        if found.fused_head:
            fused_head.install(self)
        sizes = _Sizes(self.forward)
        capture.register_sizes(outer, sizes)
        undecided.register(outer, sizes.are_open)
        self.on_undo_of(outer, lambda changed: capture.register_sizes(changed, None))
        self.on_undo_of(outer, lambda changed: undecided.register(changed, None))

    def _stop_planning(self) -> None:
        for loader, collate in self.planning.items():
            loader.collate_fn = collate
            if getattr(loader, "_iterator", None) is not None:
                loader._iterator = None  # persistent workers have a copy of the collate function


def _attachment(prepared: Any) -> _Attached | None:
    """Find what `attach` has done; None for a model that is only watched."""
    outer, _ = _found(prepared)
    attached = vars(outer).get(f"__deepytorch_{_NAME}__") if outer is not None else None
    return attached if isinstance(attached, _Attached) and attached.forward else None


class _Sizes:
    """Packed rows' sizes, for whoever replays the model's passes."""

    def __init__(self, forward: PackedForward) -> None:
        self._forward = weakref.ref(forward)
        self._shapes = forward.shapes, forward.joint_shapes
        self._users: set[str] = set()
        self._is_resumed = False

    def use_few(self, is_on: bool, by: str) -> None:
        were_few = bool(self._users)
        forward = self._forward()
        if forward is not None and not self._is_resumed:
            from . import known_sizes

            self._is_resumed = True
            known_sizes.resume(forward.model, forward.shapes, of="batches")
            known_sizes.resume(forward.model, forward.joint_shapes, of="shared passes")
        (self._users.add if is_on else self._users.discard)(by)
        if bool(self._users) != were_few:
            for shapes in self._shapes:
                shapes.use_few(_NUM_SIZES if self._users else None)

    @property
    def are_few(self) -> bool:
        forward = self._forward()
        return forward is not None and forward.are_few

    @property
    def is_shared(self) -> bool:
        forward = self._forward()
        if forward is None or forward.conventions.of_trunk:
            return forward is not None
        return forward.merged is not None and not forward.merged.is_over

    def are_open(self) -> bool:
        """Whether it is still found out if batches share passes, which have other sizes."""
        forward = self._forward()
        return forward is not None and forward.merged is not None and forward.merged.is_open

    @property
    def num_tokens(self) -> int | None:
        forward = self._forward()
        return forward.num_tokens if forward is not None else None

    @property
    def state(self) -> tuple[int | None, bool] | None:
        forward = self._forward()
        return (forward.most_targets, forward.scores_all) if forward is not None else None


def _found(prepared: Any) -> tuple[Any, Any]:
    """Find what a training loop calls inside its wrappers, and the transformers model in that."""
    transformers = sys.modules.get("transformers.modeling_utils")
    outer = model = prepared
    while transformers is not None and isinstance(model, torch.nn.Module):
        if isinstance(model, transformers.PreTrainedModel):
            return outer, model
        base_of: Any = getattr(model, "get_base_model", None)  # peft's
        if base_of is not None:
            model = base_of()
            continue
        outer = model = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    return None, None


def _is_sharded(prepared: Any) -> bool:
    """Whether a forward pass of the model gathers parameters, or works on parts of them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(
        isinstance(module, FullyShardedDataParallel) for module in prepared.modules()
    ) or any(
        hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh")
        for parameter in prepared.parameters()
    )


def _why_not(prepared: Any, found: list[Conventions], precision: torch.dtype | None) -> str | None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    try:
        from .packing_probe import Unsupported, probe
    except ImportError as error:
        return f"this version of transformers has no attention interface ({error})"
    outer, model = _found(prepared)
    # FSDP1 gathers parameters in the wrapper's forward pass, the others in the module's own.
    call = prepared if isinstance(prepared, FullyShardedDataParallel) else outer
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if any(parameter.is_meta for parameter in model.parameters()):
        return "its parameters have no values yet"
    least = precision or min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    try:
        # The model may draw random numbers in it. Those drawn afterwards have to be stock's.
        with guard.same_random_numbers():
            found.append(probe(model, call, precision=least))
    except Unsupported as reason:
        return str(reason)
    return None


def agreed(name: str, prepare: Callable[[], str | None]) -> str | None:
    """Return on every rank what `prepare` says on the rank that says no; None if all say yes.

    Collective over the default group, if there is one; `name` is of the question.
    """
    from torch.distributed import distributed_c10d as c10d

    if not c10d.is_initialized():
        return prepare()
    rank = c10d.get_rank()
    return agree(
        numbered(c10d._get_default_store(), f"deepytorch/{name}", rank),
        rank=rank,
        size=c10d.get_world_size(),
        prepare=prepare,
        here_limit_s=contract.here_limit_s(),
    )


def _refusal(adapter: str, reason: str) -> str:
    return f"{adapter}: padding_free=on: {reason}; set padding_free=auto or off"
