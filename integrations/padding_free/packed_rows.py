"""Rows of several sequences: where these begin and end, whoever has packed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepytorch.integrations.common import moved_batches
from deepytorch_core.base.transfers import to_device
from deepytorch_core.data import Packing
from deepytorch_core.data.packing import IGNORED_LABEL
from deepytorch_core.data.shapes import Shape

NUMBERS = "seq_idx"
"""The argument that gives each token the number of its sequence, for layers with a state."""
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def exact(packing: Packing) -> Shape:
    """The shape of a row that nothing is filled up with."""
    return Shape(packing.num_tokens, len(packing.lengths), packing.longest)


def bounds(lengths: Sequence[int], shape: Shape, device: torch.device) -> dict[str, Any]:
    """Find where the sequences of a row begin and end, those that fill it up among them.

    Args:
        lengths: tokens of each sequence.
        shape: what the row is filled up to.
        device: of the model.

    Returns the arguments by which attention without padding goes.
    """
    there = [0, *lengths]
    if filling := shape.num_tokens - sum(lengths):
        whole, rest = divmod(filling, shape.max_length)
        there += [shape.max_length] * whole + [rest]
    there += [0] * (shape.num_sequences + 1 - len(there))
    sizes = torch.tensor(there, dtype=torch.int64, device="cpu")
    ends = to_device(sizes.cumsum(0).to(torch.int32), device)
    return {
        **{"cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
        **{"max_length_q": shape.max_length, "max_length_k": shape.max_length},
    }


def filled(row: Tensor, filling: int, value: int) -> Tensor:
    """A row [1, tokens] with so many entries more."""
    return torch.nn.functional.pad(row, (0, filling), value=value) if filling else row


def by_position(call: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of sequences that begin where positions do, in a row without a mask.

    Stock goes by them too, with a mask of [tokens, tokens].

    Args:
        call: arguments of a model by name.

    Returns the same as `bounds`; nothing for a call that is no such row, or holds one sequence.
    """
    lengths = _lengths(call) if call.get("cu_seq_lens_q") is None else ()
    if len(lengths) < 2:
        return {}
    ids = call["input_ids"]
    return bounds(lengths, Shape(ids.shape[1], len(lengths), max(lengths)), ids.device)


def planned(call: Mapping[str, Any]) -> Packing | None:
    """How a row that somebody else has packed may be filled up, by where its sequences begin.

    Args:
        call: arguments of a causal model by name, with a position for each token.

    Returns None for a call that is no such row.
    """
    lengths = _lengths(call)
    if not lengths:
        return None
    ids, labels = call["input_ids"], call.get("labels")
    indices = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
    packing = Packing(indices, lengths, (1, ids.shape[1]))
    if isinstance(labels, Tensor) and labels.shape == ids.shape:
        targets = moved_batches.on_host(labels)[:, 1:]
        packing.num_targets = int((targets != IGNORED_LABEL).sum())
    return packing


def as_padded(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a row without a mask as those of a batch that has no padding."""
    kept = {name: value for name, value in call.items() if name not in _BOUNDS}
    return {**kept, "attention_mask": torch.ones_like(call["input_ids"])}


def without_numbers(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments without sequences' numbers of shape [1, tokens], which a row may bring."""
    numbers, ids = call.get(NUMBERS), call["input_ids"]
    if not isinstance(numbers, Tensor) or numbers.shape != ids.shape or len(ids) > 1:
        return call
    return {name: value for name, value in call.items() if name != NUMBERS}


def _lengths(call: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens of each sequence of a row; nothing for a call that is no row without a mask.

    Waits for the device, unless Accelerate has moved the row.
    """
    ids, positions = call.get("input_ids"), call.get("position_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] != 1 or not ids.numel():
        return ()
    if not isinstance(positions, Tensor) or positions.shape != ids.shape:
        return ()
    if call.get("attention_mask") is not None:
        return ()
    given = call.get("cu_seq_lens_q")
    if given is not None:
        if not isinstance(given, Tensor) or given.dim() != 1 or given.is_floating_point():
            return ()
        ends = moved_batches.on_host(given).tolist()
    else:
        begun = moved_batches.on_host(positions)[0].diff() != 1
        ends = [0, *(begun.nonzero().flatten() + 1).tolist(), ids.shape[1]]
    if ends[:1] != [0] or ends[-1] != ids.shape[1]:
        return ()
    lengths = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
    return tuple(length for length in lengths if length)
