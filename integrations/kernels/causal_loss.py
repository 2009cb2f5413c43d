"""The loss of transformers' causal language models without the logits, where nobody reads them.

It has two seams, both of one model object. The forward of the model's output head returns
`DeferredLogits` in training with labels. The model's `loss_function` computes the loss from what
stands behind these logits. So the model's own forward stays, whatever its class. Any reader of the
logits gets stock's: a metric, a custom loss, a model that scales them first. If the logits can't be
had any more, because the weights have changed since or are sharded, reading them is an error.
Evaluation, generation and calls without labels run stock.

The head is called as a module for the loss, so FSDP2 and ZeRO-3 gather its weights then; tied and
LoRA-wrapped heads are differentiated as they are. Unless asked for, the stock loss stays under
both, as a look at the logits would need the other ranks.

NOTE [Heads under ZeRO-3] DeepSpeed gathers weights before each call of a module, for its backward
pass too, and counts these. So the call that leaves out the logits goes past the head's hooks. They
see only the call for the loss.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from deepytorch_core import guard
from deepytorch_core.base import decisions
from deepytorch_core.nn.deferred_logits import (
    BYPASSED,
    DeferredLogits,
    WatchedLogits,
    is_wrappers,
)
from deepytorch_core.nn.kernels import (
    STOCK,
    Kernel,
    KernelPlace,
    KernelProbe,
    KernelSetting,
    Undo,
    register_kernel,
    register_place,
)
from deepytorch_core.nn.linear_cross_entropy import is_linear, linear_cross_entropy_sum
from deepytorch_core.nn.loss import IGNORED_LABEL
from deepytorch_core.nn.weight_changes import say_late, steps, too_late

KIND = "causal_loss"
# The stock loss has this name; models with another one keep it.
_LOSS = "ForCausalLMLoss"
# Forward passes of training in which the logits are computed as ever, see HeadForward.
WATCHED = 4
_TOKENS = {"cpu": 256}
_DEFAULT_TOKENS = 4096
# Logits of the trial, in elements.
_MOST_LOGITS = 1 << 28
_SHARDED = "the head's parameters are sharded; kernels=on leaves their logits out"

LossSum = Callable[[torch.Tensor, nn.Module, torch.Tensor, int], torch.Tensor]
"""(tokens, width), the head, (tokens,), what to ignore -> the summed loss."""


@register_place(KIND)
def find(setting: KernelSetting) -> Iterable[KernelPlace]:
    """The causal language models in the model: itself, or the one that PEFT wraps."""
    for module in setting.model.modules():
        head = _head_of(module)
        if head is not None:
            width, vocabulary = head.in_features, head.out_features
            yield KernelPlace(
                kind=KIND,
                what=f"loss of {type(module).__name__}({width}, {vocabulary})",
                targets=(module,),
                probe=lambda owner=module: _probe(owner, setting),  # type: ignore[misc]
                saves_memory=True,
                facts={"trains_head": any(p.requires_grad for p in head.parameters())},
            )


def _head_of(module: nn.Module) -> Any:
    """The head of a causal language model of transformers; None for any other module."""
    if not hasattr(type(module), "loss_function"):
        return None
    # First, since asking a model without a head for its loss makes transformers warn.
    head = module.get_output_embeddings()  # type: ignore[operator]
    if head is None or getattr(module.loss_function, "__name__", None) != _LOSS:
        return None
    sizes = [getattr(head, name, None) for name in ("in_features", "out_features")]
    return head if all(isinstance(size, int) for size in sizes) else None


def _probe(owner: Any, setting: KernelSetting) -> KernelProbe:
    probed = _ProbeModel(owner).to(setting.device).train()
    head = probed.head
    kind = setting.device.type
    wanted = _TOKENS.get(kind, _DEFAULT_TOKENS)
    tokens = max(64, min(wanted, _MOST_LOGITS // head.out_features))
    generator = torch.Generator().manual_seed(tokens)
    dtype = next(head.parameters()).dtype
    on_host: dict[str, Any] = {"generator": generator, "device": "cpu"}
    size = (1, tokens, head.in_features)
    hidden = torch.randn(size, dtype=torch.float32, **on_host)
    hidden = hidden.to(setting.device, dtype)
    labels = torch.randint(0, head.out_features, size[:2], **on_host)
    labels[:, ::5] = IGNORED_LABEL
    labels = labels.to(setting.device)

    def run() -> list[torch.Tensor | None]:
        rows = hidden.clone().requires_grad_()
        loss = probed(rows, labels=labels)
        loss.backward()
        return [loss, rows.grad]

    return KernelProbe(probed, probed, run)


class _ProbeModel(nn.Module):
    """A causal language model's end: a copy of the head, and the stock loss."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.head: Any = _copy_of(owner.get_output_embeddings())
        self.loss_function = owner.loss_function

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.head
        return head

    def forward(self, hidden: torch.Tensor, *, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        loss: torch.Tensor = self.loss_function(
            logits=logits, labels=labels, vocab_size=self.head.out_features
        )
        return loss


def _copy_of(head: Any) -> nn.Module:
    if not is_partitioned(head):
        copied: nn.Module = copy.deepcopy(head)
        return copied
    # Nobody has all of its weights, and whatever they are, kernels take as long.
    made: dict[str, Any] = {"bias": head.bias is not None, "dtype": head.weight.dtype}
    return nn.Linear(head.in_features, head.out_features, **made, device="cpu")


class _LossKernel(Kernel):
    kind = KIND
    loss_sum: LossSum

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        (owner,) = place.targets
        head = owner.get_output_embeddings()
        if "forward" in vars(head):
            return "the head's forward is replaced already"
        if is_hooked(head):
            return "somebody has a hook on the head, to see its logits"
        for parameter in head.parameters():
            if parameter.is_meta:
                return "the head's weights are not loaded yet"
            if hasattr(parameter, "device_mesh"):
                return "the head's weights are a DTensor already"
        if is_partitioned(head):
            if setting.mode != "on":
                return _SHARDED
            if not is_linear(head):
                return "the head's weights are partitioned by zero.Init, and it is no nn.Linear"
        return None

    def apply(self, target: Any, setting: KernelSetting) -> Undo:
        head = target.get_output_embeddings()
        watches = WATCHED if setting.mode == "auto" else 0
        if isinstance(target, _ProbeModel):
            watches = 0
        is_asked = setting.mode == "on"
        forward = HeadForward(head, type(self).loss_sum, watches=watches, is_asked=is_asked)
        own = {name: vars(target)[name] for name in _LOSS_NAMES if name in vars(target)}
        give_back = stand_in(target, head, forward)
        target.loss_function = LossFromHidden(target.loss_function)
        reference = weakref.ref(target)

        def undo() -> None:
            give_back()
            owner = reference()
            if owner is not None:
                for name in _LOSS_NAMES:
                    vars(owner).pop(name, None)
                vars(owner).update(own)

        return undo


# transformers keeps a loss that was set under the first name, any other object under the second.
_LOSS_NAMES = ("_loss_function", "loss_function")


class HeadForward:
    """Stands in the head's `forward`.

    In the first training steps the logits are computed as ever, to see whether somebody reads them:
    who does so in every step would pay for the head twice.

    Args:
        head: see above.
        loss_sum: what computes the loss in place of the logits.
        watches: how many forward passes to watch; 0 where it was asked for without conditions.
        is_asked: whether it was. Else the first reader gets what he reads, and nothing is left out
            any more.
    """

    def __init__(self, head: Any, loss_sum: LossSum, *, watches: int, is_asked: bool) -> None:
        self.head = head
        self.is_asked = is_asked
        self.loss_sum = loss_sum
        self.watches = watches
        self.weights = Weights(head)
        self.dropped = False
        # When the last pass was watched.
        self._watched_at: Moment | None = None
        self._armed = False

    @property
    def armed(self) -> bool:
        """Whether a pass of training with labels is under way."""
        return self._armed

    @armed.setter
    def armed(self, armed: bool) -> None:
        self._armed = armed
        own = vars(self.head)
        if armed and is_partitioned(self.head) and own.get(_PAST_HOOKS) is None:
            own[_PAST_HOOKS] = self._past_hooks
        elif not armed and own.get(_PAST_HOOKS) == self._past_hooks:
            del own[_PAST_HOOKS]

    def _past_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the head as a module under ZeRO-3: see NOTE [Heads under ZeRO-3]."""
        if len(args) == 1 and not kwargs and not self._stands_by() and not self._is_refused():
            return self._deferred(*args)
        return self.head._call_impl(*args, **kwargs)

    def __call__(
        self,
        hidden: torch.Tensor,
        *args: Any,
        targets: torch.Tensor | None = None,
        ignore_index: int = IGNORED_LABEL,
        **kwargs: Any,
    ) -> Any:
        if targets is not None:
            return self.loss_sum(hidden, self.head, targets, ignore_index)
        if self._stands_by() or args or kwargs or self._is_refused():
            return type(self.head).forward(self.head, hidden, *args, **kwargs)
        if self._is_watching():
            logits = type(self.head).forward(self.head, hidden)
            return WatchedLogits.watch(logits, self._drop_as_read)
        return self._deferred(hidden)

    def _stands_by(self) -> bool:
        if not self.armed or self.dropped or torch.compiler.is_compiling():
            return True
        return guard.is_transformed()

    def _deferred(self, hidden: torch.Tensor) -> DeferredLogits:
        kind = hidden.device.type
        enabled = torch.is_autocast_enabled(kind)
        weights, made_at = self.weights, self.weights.moment()
        deferred = DeferredLogits.make(
            lambda rows: self.logits(rows, weights, made_at),
            hidden,
            parameters=self.head.parameters(),
            shape=(*hidden.shape[:-1], self.head.out_features),
            dtype=torch.get_autocast_dtype(kind) if enabled else hidden.dtype,
            device=hidden.device,
            source=(self.head, hidden),
        )
        deferred.bypassed = BYPASSED if self.is_asked else None
        return deferred

    def _is_watching(self) -> bool:
        """Until the weights change: an activation checkpoint may make the last pass again."""
        if self.watches > 0:
            self.watches -= 1
            self._watched_at = self.weights.moment()
            return True
        if self._watched_at is not None:
            trained = any(parameter.requires_grad for parameter in self.head.parameters())
            stepped = self._watched_at[0] != steps.count
            if self.weights.changed_since(self._watched_at) if trained else stepped:
                self._watched_at = None
        return self._watched_at is not None

    def _drop_as_read(self) -> None:
        self._drop("somebody reads the logits of training steps")

    def _drop(self, reason: str) -> None:
        if not self.dropped:
            self.dropped = True
            decisions.record("loss", STOCK, reason)

    def _is_refused(self) -> bool:
        now = list(self.head.parameters())
        if self.weights.are_others() and _are_whole(now):
            self.weights = Weights(self.head)  # replaced by hand, to untie them for example
        is_sharded = self.weights.are_others() or is_partitioned(self.head)
        if len(now) != len(self.weights):
            self._drop("the head's parameters are parts of a flat one (FSDP1)")
        elif is_sharded and self.watches > 0:
            # Reading logits later would need the other ranks.
            self._drop(_SHARDED)
        elif is_hooked(self.head, by_framework=not is_sharded):
            self._drop("somebody has a hook on the head, to see its logits")
        return self.dropped

    def logits(self, hidden: torch.Tensor, weights: Weights, made_at: Moment) -> torch.Tensor:
        """Compute what stock does, through the module's hooks, so with whole weights."""
        armed, self.armed = self.armed, False
        is_sharded = weights.are_others() or is_partitioned(self.head)
        if not armed and is_sharded:
            raise too_late()
        if not armed and weights.changed_since(made_at):
            if self.is_asked:
                raise too_late()
            say_late()
        if not self.is_asked:
            self._drop_as_read()
        try:
            found: torch.Tensor = self.head(hidden)
            return found
        finally:
            self.armed = armed


class LossFromHidden:
    """Stands in the model's `loss_function`; the arguments are transformers' own."""

    def __init__(self, original: Callable[..., torch.Tensor]) -> None:
        self.original = original

    def __call__(
        self,
        logits: Any = None,
        labels: Any = None,
        vocab_size: Any = None,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED_LABEL,
        *,
        shift_labels: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        given = {
            "num_items_in_batch": num_items_in_batch,
            "ignore_index": ignore_index,
            "shift_labels": shift_labels,
            **kwargs,
        }
        if isinstance(logits, WatchedLogits):
            return self._watched(logits, labels, vocab_size, **given)
        is_left_out = isinstance(logits, DeferredLogits) and not logits.is_read
        if not is_left_out or logits.shape[-1] != vocab_size:
            return self._stock(logits, labels, vocab_size, **given)
        head, hidden = logits.source
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(hidden.device)
        loss: torch.Tensor = head(hidden.flatten(0, -2), targets=targets, ignore_index=ignore_index)
        if num_items_in_batch is None:
            return _mean(loss, (targets != ignore_index).sum())
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        mean: torch.Tensor = loss / num_items_in_batch
        return mean

    def _watched(self, logits: WatchedLogits, *others: Any, **given: Any) -> torch.Tensor:
        """This is not to be told."""
        tell = logits.tell
        try:
            return self._stock(logits.unwatched(), *others, **given)
        finally:
            WatchedLogits.watch(logits, tell)

    def _stock(self, logits: Any, labels: Any, vocab_size: Any, **given: Any) -> torch.Tensor:
        return self.original(logits=logits, labels=labels, vocab_size=vocab_size, **given)


def _mean(loss: torch.Tensor, num_targets: torch.Tensor) -> torch.Tensor:
    """As stock's: no number where nothing is trained, and gradients of zero then.

    Those of 0 / 0 would be none either, and go to all ranks.
    """
    return torch.where(num_targets > 0, loss / num_targets.clamp(min=1), math.nan)


def is_hooked(module: nn.Module, *, by_framework: bool = True) -> bool:
    """Whether somebody sees what goes in or comes out, or its gradients.

    Without `by_framework`, somebody else than what shards it.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for name in names for hook in (vars(module).get(name) or {}).values()]
    return any(by_framework or not is_wrappers(hook) for hook in hooks)


def is_partitioned(module: nn.Module) -> bool:
    """Whether ZeRO-3 keeps a part of its weights on each rank."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


# If a module has this, torch calls it in place of the module's hooks and forward.
_PAST_HOOKS = "_compiled_call_impl"
Moment = tuple[int, list[int]]


class Weights:
    """Notes which parameters a head had, without keeping them.

    ZeRO-3, FSDP1 and FSDP2 train other ones than those that they were given. CUDA graphs are made
    with other ones too, but in the same memory (`deepytorch_core.guard.recorder`).
    """

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self._noted: list[weakref.ref[nn.Parameter]] | None = None
        # In a copied or unpickled head this is made before the head has any attribute.
        if "_parameters" in vars(head):
            self._then()

    def _then(self) -> list[weakref.ref[nn.Parameter]]:
        """Those that the head had at the first call."""
        if self._noted is None:
            self._noted = [weakref.ref(parameter) for parameter in self._head.parameters()]
        return self._noted

    def __reduce__(self) -> Any:
        return Weights, (self._head,)  # a copy is of the copied head, with its own

    def __len__(self) -> int:
        return len(self._then())

    def moment(self) -> Moment:
        """Now, for `changed_since`."""
        return steps.count, [parameter._version for parameter in self._head.parameters()]

    def changed_since(self, moment: Moment) -> bool:
        """Whether they may have changed: by an optimizer, which may be fused, or by hand."""
        count, versions = moment
        if versions != [parameter._version for parameter in self._head.parameters()]:
            return True
        return steps.may_have_changed(self._head.parameters(), since=count)

    def are_others(self) -> bool:
        """Whether the head has any that it did not have, in other memory."""
        now = list(self._head.parameters())
        return len(now) != len(self) or any(map(_is_other, now, self._then()))


def _is_other(now: nn.Parameter, then: weakref.ref[nn.Parameter]) -> bool:
    before = then()
    if now is before:
        return False
    if before is None or not type(now) is type(before) is nn.Parameter:
        return True
    return now.data_ptr() != before.data_ptr() or now.shape != before.shape


def _are_whole(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether nobody can have sharded them.

    What FSDP2 gathers for a forward pass looks like any other parameter, so none are where ranks
    work together.
    """
    if dist.is_available() and dist.is_initialized():
        return False
    return all(
        type(parameter) is nn.Parameter and parameter.numel() > 0 for parameter in parameters
    )


class LeavesOut(Protocol):
    """Stands in a head's `forward`; `armed` says whether it may leave out the logits."""

    armed: bool


def stand_in(owner: Any, head: nn.Module, forward: LeavesOut) -> Undo:
    """Put `forward` in the head's place, armed during `owner`'s own; returns what undoes it."""
    vars(head)["forward"] = forward
    handles = [
        owner.register_forward_pre_hook(ArmingHook(forward), with_kwargs=True),
        owner.register_forward_hook(Disarm(forward), always_call=True),
    ]
    _counting.start_for(owner)
    reference = weakref.ref(owner)

    def undo() -> None:
        _counting.stop_for(reference())
        for handle in handles:
            handle.remove()
        vars(head).pop("forward", None)

    return undo


class _Counting:
    """The one hook by which `steps` counts, for all models that need it.

    It is not taken out as a model dies: that may be while torch goes through the hooks.
    """

    def __init__(self) -> None:
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handle: Any = None

    def start_for(self, owner: Any) -> None:
        self._owners.add(owner)
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(steps)

    def stop_for(self, owner: Any) -> None:
        if owner is not None:  # else it is gone, and from here too
            self._owners.discard(owner)
        if not self._owners and self._handle is not None:
            self._handle.remove()
            self._handle = None


_counting = _Counting()


class ArmingHook:
    """A forward pre-hook of the model: from here on its head may leave out the logits."""

    def __init__(self, forward: LeavesOut) -> None:
        self.forward = forward

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            trains = model.training and torch.is_grad_enabled()
            self.forward.armed = trains and kwargs.get("labels") is not None


class Disarm:
    """A forward hook of the model; also called when its forward has failed."""

    def __init__(self, forward: LeavesOut) -> None:
        self.forward = forward

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.forward.armed = False


@register_kernel
class ChunkedLoss(_LossKernel):
    """`linear_cross_entropy_sum`: plain torch, on any device, around any head."""

    name = "chunked"

    @staticmethod
    def loss_sum(
        hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, ignore_index: int
    ) -> torch.Tensor:
        # The forward on the instance is ours.
        stock = type(head).forward
        call = None if is_linear(head) else lambda rows: stock(head, rows)
        return linear_cross_entropy_sum(
            hidden, head, targets, ignore_index=ignore_index, forward=call
        )
