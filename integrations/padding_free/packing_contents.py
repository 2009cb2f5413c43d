"""Contents of a batch beside plain text, in the tries that find out whether a model packs.

A model may give particular ids a meaning that reaches beyond their token. Positions may leave out
the padding's id, and a scale may go by the number of masked tokens. And arguments with one entry a
token may say more than a packed row can: which tokens of a sequence see each other both ways.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepytorch_core.data import Packing

PER_TOKEN = ("position_ids", "token_type_ids")
"""Arguments with one entry a token, besides those that each batch has."""

# Parts of what such an id is called, where it stands for something that is no text.
_NO_TEXT = ("image", "audio", "video", "vision", "speech", "frame", "eoi", "boi")
_FIRST_IDS = 4  # commonly special, whatever the configuration says

_Run = Callable[[dict[str, Tensor]], tuple[Any, Packing]]


def special(model: Any, batch: dict[str, Tensor], call: Callable[..., Any]) -> dict[str, Tensor]:
    """The batch with every id in its text that the configuration gives a meaning.

    Args:
        model: a transformers model.
        batch: input_ids, attention_mask and labels of shape [batch, width] each.
        call: runs the model's forward pass. What it refuses, a training never has in its text.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    named = {
        token_id: name
        for name, token_id in _named_ids(model.config.to_dict())
        if 0 <= token_id < vocabulary
    }
    of_text = [
        token_id for token_id, name in named.items() if not any(no in name for no in _NO_TEXT)
    ]
    of_text = [*dict.fromkeys([*of_text, *range(min(_FIRST_IDS, vocabulary))])]
    others = [token_id for token_id in named if token_id not in of_text]
    made = _with_ids(batch, [*of_text, *others])
    try:
        call(**made)
    except (ValueError, RuntimeError, IndexError, TypeError):
        made = _with_ids(batch, of_text)
    return made


def _named_ids(settings: dict[str, Any], within: str = "") -> Iterator[tuple[str, int]]:
    for name, value in settings.items():
        path = f"{within}.{name}"
        if isinstance(value, dict):
            yield from _named_ids(value, path)
        elif str(name).endswith(("_id", "_index", "_ids")):
            several = value if isinstance(value, list) else [value]
            yield from ((path, token_id) for token_id in several if type(token_id) is int)


def _with_ids(batch: dict[str, Tensor], special_ids: list[int]) -> dict[str, Tensor]:
    """Each of the ids twice, as long as there is room in every other token of the text."""
    ids = batch["input_ids"].clone()
    places = batch["attention_mask"].flatten().nonzero().flatten().tolist()[1::2]
    for place, token_id in zip(places, [*special_ids, *special_ids], strict=False):
        ids.view(-1)[place] = token_id
    return {**batch, "input_ids": ids}


@dataclass(frozen=True)
class Tried:
    """Compares padded batches with their packed rows.

    Args:
        call: runs the model's forward pass.
        tolerance: what logits and loss may differ by, as a part of the largest.
    """

    call: Callable[..., Any]
    tolerance: float

    def are_alike(self, batch: dict[str, Tensor], run: _Run) -> bool:
        """Whether logits and loss of a batch are those of its packed row, as `run` gives it."""
        padded = self.call(**batch)
        row, packing = run(batch)
        real = batch["attention_mask"] != 0
        difference = (packing.unpack(row.logits) - padded.logits)[real].abs().max()
        largest = padded.logits[real].abs().max().clamp(min=1e-3)
        loss_bound = max(self.tolerance * abs(float(padded.loss)), 1e-6)
        is_loss_alike = abs(float(row.loss) - float(padded.loss)) <= loss_bound
        return is_loss_alike and bool(difference <= self.tolerance * largest)

    def per_token(self, model: Any, batch: dict[str, Tensor], run: _Run) -> tuple[str, ...]:
        """Those of `PER_TOKEN` that a packed row may bring."""
        return per_token(model, batch, lambda given: self.are_alike(given, run))


def per_token(
    model: Any, batch: dict[str, Tensor], are_alike: Callable[[dict[str, Tensor]], bool]
) -> tuple[str, ...]:
    """Those of `PER_TOKEN` with which batches give the same, as `are_alike` tells."""

    def takes(name: str) -> bool:
        try:
            return are_alike({**batch, name: _entries(name, model, batch)})
        except Exception:  # whatever a model raises for an argument that it has no use for
            return False

    names = inspect.signature(model.forward).parameters
    return tuple(name for name in PER_TOKEN if name in names and takes(name))


def _entries(name: str, model: Any, batch: dict[str, Tensor]) -> Tensor:
    rows, width = batch["input_ids"].shape
    device = batch["input_ids"].device
    columns = torch.arange(width, dtype=torch.int64, device=device).expand(rows, width)
    row = torch.arange(rows, dtype=torch.int64, device=device).unsqueeze(1)
    if name == "position_ids":
        return (columns + row) % width
    kinds = getattr(model.config, "type_vocab_size", 2) or 2
    return ((columns + row) // 3) % min(2, kinds)
