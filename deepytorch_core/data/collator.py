"""A collator that makes one packed row of the examples, in place of a padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepytorch_core.data.packing import IGNORED_LABEL


class PaddingFreeCollator:
    """Lays a batch's examples end to end, for models that take `position_ids` and lengths.

    For data loaders that are built by hand: the adapters pack batches of any padding collator by
    themselves. The keywords are those of transformers' DataCollatorWithFlattening.

    Args:
        return_position_ids: whether to return positions, which start again in every example.
        separator_id: label of each example's first token, so that no example is predicted from
            the one before it.
        return_flash_attn_kwargs: whether to return where the examples begin, which attention
            without padding needs.
        return_seq_idx: whether to return the number of each token's example.
        position_ids_start: position of an example's first token; RoBERTa-like models count
            from `padding_idx + 1`.
        return_tensors: "pt" is all there is.
        max_length: an example of more tokens is an error; None for no limit.

    Returns a dict: `input_ids`, `labels` and `position_ids` int64 [1, tokens]; `seq_idx` int32
    [1, tokens]; `cu_seq_lens_q` and `cu_seq_lens_k` int32 [examples + 1]; `max_length_q` and
    `max_length_k` int; `token_type_ids` int64 [1, tokens] where the examples have them.
    """

    def __init__(
        self,
        *,
        return_position_ids: bool = True,
        separator_id: int = IGNORED_LABEL,
        return_flash_attn_kwargs: bool = True,
        return_seq_idx: bool = False,
        position_ids_start: int = 0,
        return_tensors: str = "pt",
        max_length: int | None = None,
    ) -> None:
        if return_tensors != "pt":
            raise ValueError(f"return_tensors={return_tensors!r}: PaddingFreeCollator makes 'pt'")
        self.return_position_ids = return_position_ids
        self.separator_id = separator_id
        self.return_flash_attn_kwargs = return_flash_attn_kwargs
        self.return_seq_idx = return_seq_idx
        self.position_ids_start = position_ids_start
        self.return_tensors = return_tensors
        self.max_length = max_length

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pack examples of `input_ids`, `labels` (default: the ids) and `token_type_ids`.

        Padding that an example's `attention_mask` marks is left out, empty examples too.

        Raises ValueError for examples that are packed already, too long, or all empty.
        """
        examples = [self._example(feature, number) for number, feature in enumerate(features)]
        examples = [example for example in examples if len(example["input_ids"])]
        if not examples:
            raise ValueError("PaddingFreeCollator: a batch has no tokens")
        sizes = [len(example["input_ids"]) for example in examples]
        lengths = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        batch: dict[str, Any] = {
            name: torch.cat([example[name] for example in examples]).unsqueeze(0)
            for name in examples[0]
        }
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        if self.return_position_ids:
            places = [torch.arange(size, dtype=torch.int64, device="cpu") for size in sizes]
            batch["position_ids"] = torch.cat(places).unsqueeze(0) + self.position_ids_start
        if self.return_seq_idx:
            numbers = torch.arange(len(examples), dtype=torch.int32, device="cpu")
            batch["seq_idx"] = numbers.repeat_interleave(lengths).unsqueeze(0)
        if self.return_flash_attn_kwargs:
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = bounds
            batch["max_length_q"] = batch["max_length_k"] = max(sizes)
        return batch

    def _example(self, feature: Mapping[str, Any], number: int) -> dict[str, torch.Tensor]:
        if "position_ids" in feature or "cu_seq_lens_q" in feature:
            raise ValueError(
                f"PaddingFreeCollator: example {number} has position_ids, so it is packed already: "
                "pack once, in the dataset or here"
            )
        ids = _ids(feature["input_ids"])
        if ids.dim() != 1:
            raise ValueError(
                f"PaddingFreeCollator: input_ids of example {number} have the shape "
                f"{tuple(ids.shape)}; expected one dimension"
            )
        labels = feature.get("labels")
        example = {
            "input_ids": ids,
            "labels": (ids if labels is None else _ids(labels)).clone(),
        }
        if "token_type_ids" in feature:
            example["token_type_ids"] = _ids(feature["token_type_ids"])
        for name, values in example.items():
            if values.shape != ids.shape:
                raise ValueError(
                    f"PaddingFreeCollator: example {number} has {len(ids)} input_ids and "
                    f"{len(values)} {name}"
                )
        if "attention_mask" in feature:
            kept = _ids(feature["attention_mask"]) != 0
            example = {name: values[kept] for name, values in example.items()}
        length = len(example["input_ids"])
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"PaddingFreeCollator: example {number} has {length} tokens, more than "
                f"max_length={self.max_length}: truncate it"
            )
        example["labels"][:1] = self.separator_id
        return example


def _ids(values: Any) -> torch.Tensor:
    """int64, on the host whatever the program's default device is."""
    return torch.as_tensor(values, dtype=torch.int64, device="cpu")
