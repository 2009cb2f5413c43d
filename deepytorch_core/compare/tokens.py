"""Counts the real tokens that a training script's loader hands out, padding left out.

Batches are counted where torch's loader collates them, in the order in which they are trained on.
So a step's tokens are those of its micro-batches, however early a batch was fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils import fetch

from deepytorch_core.base.patching import Patches


@dataclass(frozen=True)
class TokenCount:
    """Say how many tokens batches have, and how many pairs of tokens of the same sequence.

    Causal attention computes with half of the pairs.
    """

    tokens: int
    pairs: int


class TokenCounter:
    """Counts batches in this process; those that workers collate stay unknown."""

    def __init__(self) -> None:
        self._batches: list[TokenCount] = []

    def install(self, patches: Patches) -> None:
        """Watch what loaders collate from now on, until `patches` are undone."""
        for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            patches.replace(fetcher, "fetch", self._watched)

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fetched(fetcher: Any, *args: Any, **kwargs: Any) -> Any:
            batch = original(fetcher, *args, **kwargs)
            counted = count(batch)
            if counted is not None:
                self._batches.append(counted)
            return batch

        return fetched

    def of_steps(self, steps: range, micro_batches: int) -> TokenCount | None:
        """Return the count of steps, numbered from 0, that have so many micro-batches each.

        None where not all of their batches were seen.
        """
        first, end = steps.start * micro_batches, steps.stop * micro_batches
        if not steps or end > len(self._batches):
            return None
        batches = self._batches[first:end]
        return TokenCount(sum(each.tokens for each in batches), sum(each.pairs for each in batches))


def count(batch: Any) -> TokenCount | None:
    """Count a batch of a language model's: None for anything else.

    Args:
        batch: with `input_ids` (batch, length) and, where there is padding, an `attention_mask` of
            that shape; packed rows have `position_ids` of that shape that begin anew.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        return None
    ids: Tensor = batch["input_ids"]
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return _of_lengths(mask.sum(-1).reshape(-1).tolist())
    if isinstance(positions, Tensor) and positions.shape == ids.shape:
        starts = (positions.reshape(-1) == 0).nonzero().reshape(-1)
        ends = torch.cat([starts[1:], starts.new_tensor([ids.numel()])])
        return _of_lengths((ends - starts).tolist())
    return _of_lengths([ids.shape[-1]] * (ids.numel() // max(1, ids.shape[-1])))


def _of_lengths(lengths: Sequence[int]) -> TokenCount:
    return TokenCount(sum(map(int, lengths)), sum(int(length) ** 2 for length in lengths))
