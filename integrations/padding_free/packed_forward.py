"""One model's forward pass without padding: what goes in is packed, what comes out is unpacked.

Works by hooks on the module whose forward pass the training loop calls, so the loop, its loader and
its labels stay as they are. Packed is only what is trained: in eval mode, and in `generate`, the
model runs with its own attention on the padded batch.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepytorch.integrations.common import moved_batches
from deepytorch.integrations.common.contract import IntegrationError
from deepytorch.integrations.common.hook import Hook
from deepytorch.integrations.common.planned_batches import plan_of
from deepytorch.integrations.kernels import masked_loss
from deepytorch_core import guard
from deepytorch_core.base import decisions
from deepytorch_core.base.console import say_once
from deepytorch_core.compile import seam
from deepytorch_core.compile.fixes._transformers import caches
from deepytorch_core.data import Packing, Shapes, full, plan
from deepytorch_core.data.shapes import Shape
from deepytorch_core.nn.deferred_logits import apart

from . import (
    foreign_hooks,
    fused_head,
    merged_passes,
    packed_attention,
    packed_rows,
    unpacked_output,
)
from .keys import BATCH_KEY
from .merged_passes import MergedPasses

# Parts of a row, in which the share of its tokens that are targets is counted.
_SHARES = 16
# So many calls are watched for batches that the loop changes before it is trusted not to.
_WATCHED = 16
# Batches whose shape is known, should they come again.
_MOST_FITTED = 64
# Arguments with one entry a token, which every batch may bring.
_PER_TOKEN = ("input_ids", "attention_mask", "labels")
# Arguments that ask for the same of a row as of a batch. Any other may do something with it.
_HARMLESS = ("num_items_in_batch", "output_hidden_states", "return_dict")
CONTAMINATED = (
    "its row holds several sequences, which see each other since the model makes a cache: call it "
    "with use_cache=False to train them apart"
)
FUSED_HEAD = "fused_lm_head"
"""The argument that asks for log-probabilities, of a model that TRL has given a fused head."""


@dataclass(frozen=True)
class Conventions:
    """How a model counts; found out by the probe."""

    shifted: bool  # the loss compares a token with the label after it
    first_position: int | None  # positions count a row's tokens from here; None: columns
    max_positions: int | None  # rows of the table of learned positions, if there is one
    fused_head: bool = False  # it has TRL's fused head, which takes a packed row
    counts_items: bool = False  # its loss is the tokens' sum divided by `num_items_in_batch`
    padding_id: int | None = None  # positions count the tokens with another id, in the padded row
    per_token: tuple[str, ...] = ()  # arguments that are packed besides
    by_position: bool = False  # without a mask, sequences of a row begin where positions do
    of_trunk: bool = False  # its trunk is packed alone, as its head takes a part of each sequence
    is_aligned: bool = False  # that part is right where sequences begin in the first column


class PlanningCollate:
    """A collate function that also plans the packing of its batch, on the CPU."""

    def __init__(self, collate: Callable[[Any], Any], shifted: bool) -> None:
        self.collate = collate
        self.shifted = shifted

    def __call__(self, features: Any) -> Any:
        batch = self.collate(features)
        if not isinstance(batch, MutableMapping) or BATCH_KEY in batch:
            return batch
        given = [batch.get(key) for key in ("input_ids", "attention_mask", "labels")]
        # Without labels it is for `generate` or another model, which would refuse the plan.
        tensors = [value for value in given if isinstance(value, Tensor)]
        if len(tensors) < len(given):
            return batch
        ids, mask, labels = tensors
        if ids.shape == mask.shape:
            batch[BATCH_KEY] = plan(mask, labels, shifted=self.shifted)
        return batch


class _Call(NamedTuple):
    """A packed call."""

    packing: Packing
    given: tuple[Any, Any]  # args and keywords of the padded one
    row: int  # tokens
    with_loss: bool
    is_tuple: bool  # it asks for one
    with_cache: bool  # whose parts would have a cache among them


class PackedForward:
    """The hooks of one model.

    Args:
        model: the transformers model whose configuration names the attention.
        outer: the module that the training loop calls inside its wrappers: the model, or a
            PeftModel around it.
        conventions: see there.
        strict: whether a batch that can't be packed is an error; else it stays padded.
        is_asked: whether somebody wants it by name. Else who reads outputs gets the padded batch's,
            and no batch is packed from then on.
        is_whole: whether a rank can run a pass of the model alone.
    """

    def __init__(
        self,
        model: Any,
        outer: torch.nn.Module,
        conventions: Conventions,
        *,
        strict: bool = False,
        is_asked: bool = True,
        is_whole: bool = True,
    ) -> None:
        self.shapes = Shapes()
        self.joint_shapes = Shapes()
        """Those of rows of several micro-batches: about as long as each other, and longer."""
        self.num_tokens: int | None = None
        """Tokens of the last batch, without those that fill it up."""
        self.are_few = False
        """Whether the last batch has one of few shapes."""
        self.most_targets: int | None = None
        """A bound on the targets of the batch under way."""
        self.merged: MergedPasses | None = None
        """Makes passes for several micro-batches at once, where they share them."""
        self.is_apart = False
        """Whether it is known that they don't."""
        self._model_of = weakref.ref(model)  # it lives no longer for our sake
        self.conventions = conventions
        self._strict = strict
        self._is_asked = is_asked
        self._is_whole = is_whole
        self._ended_by: str | None = None  # why batches stay padded from then on
        self._names = list(inspect.signature(outer.forward).parameters)
        self._harmless = {*_HARMLESS, *([FUSED_HEAD] if conventions.fused_head else [])}
        self._per_token = {*_PER_TOKEN, *conventions.per_token}
        if getattr(model.config, "output_router_logits", False):
            self._harmless.add("output_router_logits")  # which the probe has seen then
        self._hooks = [
            (name or type(model).__name__, hooks)
            for name, module in model.named_modules()
            if module is not outer
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
        ]
        # Those under way, the innermost last; None for what is not packed.
        self._calls: list[_Call | None] = []
        self._said: set[str] = set()
        self._num_watched = 0  # calls for which it was waited whether their batch had been changed
        self._are_changed = False
        self._full: tuple[int, int] | None = None
        # Shapes of the last batches, by what is known of them.
        self._fitted: OrderedDict[tuple[int, int, int], Shape] = OrderedDict()
        self._target_share = 0  # the largest so far, in parts of a row's tokens
        self._labelled = fused_head.Labelled()
        self.scores_all = False
        """Whether a fused head of the pass under way scores all of its positions."""

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._model_of()

    def install(self, outer: torch.nn.Module) -> Callable[[], None]:
        """Put the hooks on `outer`; returns what takes them off again."""
        close = packed_attention.use_packed()
        weakref.finalize(outer, close).atexit = False
        handles = (
            outer.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            # First of all: the others see the padded batch's output.
            outer.register_forward_hook(
                Hook(self._after), prepend=True, with_kwargs=True, always_call=True
            ),
        )

        def remove() -> None:
            for handle in handles:
                handle.remove()
            if self.merged is not None and self.model is not None:
                merged_passes.undo(self.model)
            close()

        return remove

    def _before(
        self, outer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        planned = kwargs.pop(BATCH_KEY, None)
        if getattr(outer, "_is_replica", False):
            return args, kwargs  # of nn.DataParallel, whose threads share these hooks
        call = {**dict(zip(self._names, args, strict=False)), **kwargs}
        is_packed = call.get("cu_seq_lens_q") is not None
        if not is_packed and self.conventions.by_position and (found := self._sequences(call)):
            is_packed, kwargs = True, {**kwargs, **found}
        if is_packed:
            kwargs = {**kwargs, packed_attention.PACKED: True}
        is_row = False  # that somebody has packed, and is filled up
        if planned is None and (bare := self._bare(call, is_packed)) is not None:
            is_row, is_packed = call.get("position_ids") is not None, False
            call, planned = bare
        generates = bool(call.get("use_cache")) and not torch.is_grad_enabled()
        is_padded = call.get("attention_mask") is not None and not is_packed and not generates
        if not self.model.training or not is_padded:
            # Our attention takes a row that somebody else has packed as it is, without a mask.
            if is_packed:
                packed_attention.enter_packed()
            self._goes_apart(outer)
            self._calls.append(None)
            self.num_tokens, self.are_few = None, bool(self.shapes.limit) and not is_packed
            return args, kwargs
        # Nothing keeps a row from it: that was asked already.
        obstacle = None if is_row else self._hindrance(call)
        packing = None
        if obstacle is None:
            packing = self._packing(call, planned)
            obstacle = packing.obstacle or self._too_long(call, packing)
        if packing is None or obstacle is not None:
            self._stay_padded(obstacle)
            self._goes_apart(outer)
            self._calls.append(None)
            self.num_tokens, self.are_few = None, False
            return args, kwargs
        self.num_tokens, self.are_few = packing.num_tokens, bool(self.shapes.limit)
        if is_row:
            self._goes_apart(outer)
        merged = None if is_row else self.merged
        shared = None if merged is None else self._shared(merged, outer, call, packing)
        if shared is None and self._stays(packing):
            self._calls.append(None)
            self._expect(packing, packing.num_tokens)
            if not self.shapes.limit:
                return args, kwargs
            # To be replayed: a mask of ones would make models look for a zero, and so wait.
            return (), {name: value for name, value in call.items() if name != "attention_mask"}
        packed = self.pack(call, packing) if shared is None else shared
        self.are_few = (self.shapes if shared is None else self.joint_shapes).are_few
        row = packed["input_ids"].shape[1]
        is_tuple = call.get("return_dict") is False
        if is_tuple:
            packed["return_dict"] = True  # a tuple doesn't say what its parts are
        has_cache = (is_tuple or not self._is_asked) and self._would_cache(call)
        made = (args, kwargs), row, "labels" in packed, is_tuple, has_cache
        self._calls.append(_Call(packing, *made))
        self._expect(packing, row)
        packed_attention.enter_packed()
        return (), packed

    def _after(self, outer: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if getattr(outer, "_is_replica", False):
            return output
        call = self._calls.pop() if self._calls else None
        if self.merged is not None:
            self.merged.leave()
        self.most_targets, self.scores_all = None, False
        masked_loss.expect(None)
        fused_head.expect(False)
        self._ended_by = packed_attention.leave_packed() or self._ended_by
        if call is None or output is None:
            return output
        if not self._is_asked:
            return self._on_demand(outer, call, output)
        result = unpacked_output.unpacked(output, call.packing, call.row, lazily=call.with_loss)
        if not call.is_tuple or isinstance(result, tuple):
            return result
        return unpacked_output.as_tuple(result, with_cache=call.with_cache)

    def _on_demand(self, outer: torch.nn.Module, call: _Call, output: Any) -> Any:
        reference, run = weakref.ref(outer), _in_autocast_of_now(call.packing.indices.device.type)

        def padded() -> Any:
            args, kwargs = call.given
            model: Any = reference()
            # Not the hooks: they have seen this call.
            return run(lambda: model.forward(*args, **kwargs))

        stock = unpacked_output.Stock(padded if self._is_whole else None, self._on_reader)
        return unpacked_output.on_demand(
            output, call.packing, call.row, stock, has_cache=call.with_cache
        )

    def _on_reader(self, field: str, reader: str) -> None:
        self._ended_by = unpacked_output.reads(reader, field)
        self._said.add(self._ended_by)
        name = type(self.model).__name__
        ends = "batches stay padded from now on"
        if not self._is_whole:
            ends += ", and what it has read of this one is zero at padding"
        decisions.record("padding-free", "padded", f"{name}: {self._ended_by}")
        say_once(
            f"padding-free: {name}: {reader} reads {field} of its output, which may hold padding: "
            f"{ends}",
            level="warning",
        )

    def _sequences(self, call: dict[str, Any]) -> dict[str, Any]:
        """Find where sequences begin in a row that somebody has packed by its positions alone."""
        is_trained = self.model.training and torch.is_grad_enabled()
        found = {} if not is_trained else packed_rows.by_position(call)
        if not (found and self._would_cache(call)):
            return found
        self._say(CONTAMINATED, "row stays as it is")
        say_once(f"padding-free: {type(self.model).__name__}: {CONTAMINATED}", level="warning")
        return {}

    def _bare(self, call: dict[str, Any], is_packed: bool) -> tuple[dict[str, Any], Packing] | None:
        """A call without a mask as one with it, and its plan, to be replayed by a causal model.

        That is a batch without padding, see `_stays`, or a row that somebody else has packed.
        """
        ids: Any = call.get("input_ids")
        is_replayed = bool(self.shapes.limit) and self.conventions.shifted
        is_trained = self.model.training and torch.is_grad_enabled()
        is_batch = isinstance(ids, Tensor) and ids.dim() == 2 and ids.numel() > 0
        if not (is_replayed and is_trained and is_batch) or call.get("attention_mask") is not None:
            return None
        packing: Packing | None = None
        if all(call.get(name) is None for name in ("position_ids", "cu_seq_lens_q")):
            packing = full(ids)
        elif not (self._ended_by or self._foreign_hook()):
            packing = packed_rows.planned(call)
            if packing is not None and len(packing.lengths) > 1 and not is_packed:
                return None  # its sequences see each other
        masked = packed_rows.as_padded(call)
        if packing is None or self._obstacle(packed_rows.without_numbers(masked)) is not None:
            return None
        return masked, packing

    def _stays(self, packing: Packing) -> bool:
        """Whether the batch has no padding; where shapes are few, batches of one shape alone.

        Batches of causal models are packed then. Without a mask these models look for packed rows,
        and so wait for the GPU, and they return their cache.
        """
        if packing.is_full and self._full is None:
            self._full = packing.shape
        if not self.shapes.limit:
            return packing.is_full
        return packing.shape == self._full and packing.is_full and not self.conventions.shifted

    def _hindrance(self, call: dict[str, Any]) -> str | None:
        """Why a call must stay padded, whatever its batch."""
        return self._ended_by or self._obstacle(call) or self._foreign_hook()

    def _foreign_hook(self) -> str | None:
        """Why the batch must stay padded: somebody looks into the model, and would see one row."""
        for name, hooks in self._hooks:
            for hook in hooks.values() if hooks else ():
                if foreign_hooks.is_foreign(hook):
                    hooked = f"{foreign_hooks.name_of(hook)} is a hook on {name}"
                    return f"{hooked}, which would see one packed row"
        return None

    def _expect(self, packing: Packing, row: int) -> None:
        """Tell the head how many targets a row of so many tokens has at most.

        Where shapes are few, the bound goes by the row's shape, so that there are few of it too.
        """
        if self.conventions.fused_head:
            self._labelled.add(packing)
            self.scores_all = self._labelled.are_most
            fused_head.expect(self.scores_all)
            fused_head.note(packing)
        bound = packing.num_targets
        if bound is None or not masked_loss.is_used(self.model):
            return
        if self.shapes.limit:
            share = -(-_SHARES * bound // max(1, packing.num_tokens))
            self._target_share = max(self._target_share, share)
            bound = max(bound, -(-row * self._target_share // _SHARES))
        self.most_targets = masked_loss.most_targets(bound)
        masked_loss.expect(self.most_targets)

    def _packing(self, call: dict[str, Any], planned: Packing | None) -> Packing:
        mask, labels, ids = call["attention_mask"], call.get("labels"), call["input_ids"]
        if planned is None or planned.shape != tuple(ids.shape):
            # Else it waits for the device: nobody has the tokens on the CPU.
            on_host = [None if t is None else moved_batches.find(t) for t in (mask, labels)]
            known = mask if on_host[0] is None else on_host[0]
            targets = labels if on_host[1] is None else on_host[1]
            planned = plan_of(known, targets, shifted=self.conventions.shifted)
        elif planned.obstacle is None:
            planned = planned.to(ids.device, non_blocking=True)
            if not self._is_unchanged(planned, mask, labels):
                planned = plan(mask, labels, shifted=self.conventions.shifted)
        return planned.to(ids.device, non_blocking=True)

    def _is_unchanged(self, packing: Packing, mask: Tensor, labels: Tensor | None) -> bool:
        """Whether the loop passes the batch that was collated.

        A loop that changes batches does so from its first steps on. There the answer is waited for,
        as it is on the CPU; on devices that then only see to it.
        """
        same = (packing.pack(mask) != 0).all() & ((mask != 0).sum() == packing.num_tokens)
        if labels is not None and packing.num_targets is not None:
            targets = labels[:, 1:] if self.conventions.shifted else labels
            packed = packing.pack_labels(labels, shifted=self.conventions.shifted)
            same = same & ((targets != -100).sum() == (packed != -100).sum())
        is_watched = self._num_watched < _WATCHED or mask.device.type == "cpu"
        if is_watched or self._are_changed:
            self._num_watched += 1
            if not bool(same):
                self._are_changed = True
                self._say("the loop changes what the data loader has made", "batches planned anew")
            return bool(same)
        torch._assert_async(
            same,
            "padding_free: attention_mask or labels were changed after the data loader had made "
            "the batch: change them in the collate function, or set padding_free=off",
        )
        return True

    def _stay_padded(self, obstacle: str | None) -> None:
        if obstacle is None:
            return
        if self._strict:
            raise IntegrationError(f"padding_free=on: {obstacle}; or set padding_free=auto or off")
        self._say(obstacle, "batch stays padded")

    def _say(self, reason: str, chosen: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            decisions.record("padding-free", chosen, reason)

    def _shared(
        self, merged: MergedPasses, outer: torch.nn.Module, call: dict[str, Any], packing: Packing
    ) -> dict[str, Any] | None:
        """The arguments of a micro-batch that shares a pass with others."""
        packed = merged.enter(self, call, packing)
        if packed is not None:
            self.num_tokens = merged.num_tokens
        if (found := seam.of(outer)) is not None:
            found.is_continued = merged.is_within
        return packed

    def _goes_apart(self, outer: torch.nn.Module) -> None:
        """A call begins that shares no pass."""
        if self.merged is None or not self.model.training:
            return
        self.merged.meet_other()
        if (found := seam.of(outer)) is not None:
            found.is_continued = False

    def planned(self, call: dict[str, Any], planned: Packing | None) -> Packing | None:
        """How a batch that is to come packs; None where it stays padded."""
        if self._obstacle(call) is not None:
            return None
        packing = self._packing(call, planned)
        return None if packing.obstacle or self._too_long(call, packing) else packing

    def pack(
        self, call: dict[str, Any], packing: Packing, *, is_filled: bool = True
    ) -> dict[str, Any]:
        """The arguments for one packed row in place of those for a padded batch.

        `is_filled`: whether the row is filled up to one of few shapes.
        """
        ids, labels = call["input_ids"], call.get("labels")
        shape = self._fit(packing) if is_filled else packed_rows.exact(packing)
        filling = shape.num_tokens - packing.num_tokens
        packed = {key: value for key, value in call.items() if value is not None}
        packed["input_ids"] = packed_rows.filled(packing.pack(ids), filling, 0)
        packed["attention_mask"] = packed_rows.filled(torch.ones_like(packed["input_ids"]), 0, 0)
        if filling:
            packed["attention_mask"][:, packing.num_tokens :] = 0
        packed["position_ids"] = packed_rows.filled(self._positions(call, packing), filling, 0)
        for name, value in (("token_type_ids", 0), (packed_rows.NUMBERS, len(packing.lengths))):
            if call.get(name) is not None:
                packed[name] = packed_rows.filled(packing.pack(call[name]), filling, value)
        if labels is not None:
            targets = packing.pack_labels(labels, shifted=self.conventions.shifted)
            packed["labels"] = packed_rows.filled(targets, filling, -100)
        packed |= packed_rows.bounds(packing.lengths, shape, ids.device)
        packed[packed_attention.PACKED] = True
        if "use_cache" in self._names or caches(self.model):
            packed["use_cache"] = False
        return packed

    def joined(self, rows: Sequence[dict[str, Any]], packings: Sequence[Packing]) -> dict[str, Any]:
        """The arguments for one row of several, filled up to one of few shapes."""
        lengths = [length for packing in packings for length in packing.lengths]
        num_tokens = sum(lengths)
        shape = self.joint_shapes.fit(num_tokens, len(lengths), max(lengths))
        names = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
        joint = {
            name: packed_rows.filled(
                torch.cat([row[name] for row in rows], dim=1), shape.num_tokens - num_tokens, 0
            )
            for name in names
            if name in rows[0]
        }
        return joint | packed_rows.bounds(lengths, shape, rows[0]["input_ids"].device)

    def _would_cache(self, call: dict[str, Any]) -> bool:
        asked = call.get("use_cache")
        return caches(self.model) if asked is None else bool(asked)

    def _fit(self, packing: Packing) -> Shape:
        """Within a backward pass, where an activation checkpoint is computed again, as before."""
        num_rows, num_sequences = packing.shape[0], len(packing.lengths)
        batch = (packing.num_tokens, max(num_rows, num_sequences), packing.longest)
        is_again = torch._C._current_graph_task_id() != -1
        if not is_again or batch not in self._fitted:
            self._fitted[batch] = self.shapes.fit(*batch, is_row=num_sequences > num_rows)
            self._fitted.move_to_end(batch)
            if len(self._fitted) > _MOST_FITTED:
                self._fitted.popitem(last=False)
        return self._fitted[batch]

    def _too_long(self, call: dict[str, Any], packing: Packing) -> str | None:
        limit = self.conventions.max_positions
        first = self.conventions.first_position or 0
        if (
            limit is None
            or call.get("position_ids") is not None
            or packing.longest + first <= limit
        ):
            return None
        return (
            f"a sequence of {packing.longest} tokens is longer than the {limit} positions "
            f"that {type(self.model).__name__} has: truncate it"
        )

    def _positions(self, call: dict[str, Any], packing: Packing) -> Tensor:
        given, rule = call.get("position_ids"), self.conventions
        if given is not None:
            return packing.pack(given.expand(packing.shape))
        if rule.first_position is None:
            return packing.columns()
        if rule.padding_id is not None:
            counted = (call["input_ids"] != rule.padding_id).to(torch.int64)
            return packing.pack(counted.cumsum(1) * counted + rule.first_position - 1)
        return packing.ranks_in_row() + rule.first_position

    def _obstacle(self, call: Mapping[str, Any]) -> str | None:
        """Why a call can't be packed, whatever its batch."""
        asked = call.get("return_dict")
        is_tuple = not (getattr(self.model.config, "return_dict", True) if asked is None else asked)
        if is_tuple and not self._is_asked:
            return "the model is asked for a tuple"
        ids = call.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return "the model is called without input_ids of shape [batch, length]"
        mask = call["attention_mask"]
        if not isinstance(mask, Tensor) or mask.shape != ids.shape:
            return f"attention_mask isn't a tensor of shape {tuple(ids.shape)} like input_ids"
        positions = call.get("position_ids")
        if positions is not None and positions.dim() > 2:
            return "position_ids have more than one number for a token"
        labels = call.get("labels")
        if labels is not None and tuple(labels.shape) != tuple(ids.shape):
            return f"labels have the shape {tuple(labels.shape)}, input_ids have {tuple(ids.shape)}"
        if getattr(self.model.config, "output_attentions", False):
            return "the model's configuration asks for output_attentions"
        for name, value in call.items():
            if name in self._per_token or value is None or value is False:
                continue
            if isinstance(value, Tensor) and value.dim():
                return f"the model is called with {name}, which can't be packed"
            keeps_all = name == "logits_to_keep" and type(value) is int and value == 0
            if name not in self._harmless and not keeps_all:
                return f"the model is called with {name}" + ("=True" if value is True else "")
        return None


def _in_autocast_of_now(kind: str) -> Callable[[Callable[[], Any]], Any]:
    """Runs a pass as it would have run now, whoever asks for it later; draws no random numbers."""
    dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def run(forward: Callable[[], Any]) -> Any:
        eagerly = torch.compiler.set_stance("force_eager")  # its shapes come once
        autocast = torch.autocast(kind, dtype=dtype, enabled=is_on)
        with guard.same_random_numbers(), eagerly, apart(), autocast:
            return forward()

    return run
