"""Rows of several sequences: where these begin and end, whoever has packed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepytorch_core.base.transfers import to_device
from deepytorch_core.data import Packing
from deepytorch_core.data.shapes import Shape


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

    Stock goes by them too, with a mask of [tokens, tokens]. Waits for the device of the positions.

    Args:
        call: arguments of a model by name.

    Returns the same as `bounds`; nothing for a call that is no such row.
    """
    ids, positions = call.get("input_ids"), call.get("position_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] != 1:
        return {}
    if not isinstance(positions, Tensor) or positions.shape != ids.shape:
        return {}
    if call.get("attention_mask") is not None:
        return {}
    starts = ((positions[0].cpu().diff() != 1).nonzero().flatten() + 1).tolist()
    if not starts:
        return {}
    ends = [0, *starts, ids.shape[1]]
    lengths = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
    return bounds(lengths, Shape(ids.shape[1], len(lengths), max(lengths)), ids.device)
