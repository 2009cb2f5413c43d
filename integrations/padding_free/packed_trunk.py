"""Packs a model whose head takes a part of each sequence, such as a classifier or a reward model.

Its trunk alone runs on one packed row. The head gets hidden states of the padded batch's shape,
with zeros at padding, and takes the first or the last token of each sequence, or a mean of them. So
what it returns is what the padded batch gives, whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepytorch.integrations.common import moved_batches
from deepytorch.integrations.common.hook import Hook

from . import packed_attention, unpacked_output
from .packed_forward import Conventions, PackedForward

_FIELDS = ("hidden_states", "attentions", "router_logits")


def pools(model: Any) -> bool:
    """Whether a transformers model's head gives something for each sequence, not for each token."""
    return type(model).__name__.endswith("ForSequenceClassification")


class PackedTrunk(PackedForward):
    """The hooks of one model and its trunk.

    Args:
        model: the transformers model with the head; `model.base_model` is packed in its calls.
        conventions: see `Conventions`, of the whole model.
        strict: whether a batch that can't be packed is an error; else it stays padded.
    """

    def __init__(self, model: Any, conventions: Conventions, *, strict: bool = False) -> None:
        super().__init__(model.base_model, model.base_model, conventions, strict=strict)
        self._harmless.discard("output_hidden_states")
        self._num_within = 0  # calls of the model under way

    def install(self, outer: torch.nn.Module) -> Callable[[], None]:
        """Put the hooks on the trunk of `outer`, the model; returns what takes them off again."""
        trunk: Any = self.model
        handles = (
            outer.register_forward_pre_hook(Hook(self._enter)),
            outer.register_forward_hook(Hook(self._leave), always_call=True),
        )
        remove_from_trunk = super().install(trunk)

        def remove() -> None:
            for handle in handles:
                handle.remove()
            remove_from_trunk()

        return remove

    def _enter(self, outer: Any, args: Any) -> None:
        self._num_within += 1

    def _leave(self, outer: Any, args: Any, output: Any) -> None:
        self._num_within = max(0, self._num_within - 1)  # they may be put on within a call

    def _before(
        self, outer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._num_within or getattr(outer, "_is_replica", False):
            return super()._before(outer, args, kwargs)
        # Somebody calls the trunk, who may read what it gives at padding.
        self._calls.append(None)
        self.num_tokens, self.are_few = None, False
        return args, kwargs

    def _hindrance(self, call: dict[str, Any]) -> str | None:
        return super()._hindrance(call) or self._misplaced(call)

    def _misplaced(self, call: dict[str, Any]) -> str | None:
        """Why the head would take another token than the one that it takes of the padded batch."""
        config = self.model.config
        for field in _FIELDS:
            if getattr(config, f"output_{field}", False):
                return f"its configuration asks for {field}"
        ids, mask = (moved_batches.on_host(call[name]) for name in ("input_ids", "attention_mask"))
        if bool(((ids != config.pad_token_id) & (mask == 0)).any()):
            return "ids behind its attention_mask are not the padding's"
        if self.conventions.is_aligned and not bool(mask[:, 0].all()):
            return "sequences don't begin in its first column, which the model's head takes"
        return None

    def _after(self, outer: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if getattr(outer, "_is_replica", False):
            return output
        call = self._calls.pop() if self._calls else None
        self._ended_by = packed_attention.leave_packed() or self._ended_by
        if call is None or output is None:
            return output
        trunk: Any = outer
        found = type(output)(last_hidden_state=call.packing.unpack(output.last_hidden_state))
        if getattr(output, "pooler_output", None) is not None:
            found["pooler_output"] = trunk.pooler(found.last_hidden_state)
        if call.is_tuple:
            return unpacked_output.as_tuple(found, with_cache=call.with_cache)
        return found
