# SPDX-License-Identifier: Apache-2.0
"""What the instruction recipes share: their options, their data, and the loss of the answers."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from deepytorch.integrations.transformers import BATCH_KEY, IntegrationError, pack_batches
from deepytorch.recipes._batches import EndlessBatches, in_batches
from deepytorch.recipes._chat import Conversation, encode_all, load_conversations, print_masked
from deepytorch.recipes._config import RecipeError
from deepytorch.recipes._data import Batch, collate
from deepytorch.recipes._options import RunOptions
from deepytorch.recipes._run import Process, console


@dataclass(frozen=True, kw_only=True)
class TextOptions(RunOptions):
    """Options of the recipes that fine-tune on instructions."""

    model: str | None = None
    data: str | None = None
    data_format: Literal["auto", "alpaca", "sharegpt"] = "auto"
    train_on_prompt: bool = False
    max_length: int = 512
    held_out: int = 4
    padding_free: Literal["auto", "on", "off"] = "auto"
    sample_tokens: int = 120

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("max_length", "held_out", "sample_tokens")


@dataclass(frozen=True)
class Data:
    """This rank's batches, and what is kept out of training."""

    batches: EndlessBatches[Batch]
    held_out: list[Batch]
    sample: Conversation


def prepare_data(config: TextOptions, tokenizer: Any, process: Process) -> Data:
    """Read, shuffle, split and encode ``config.data``; says what was cut and left out."""
    conversations = load_conversations(config.data, config.data_format)
    random.Random(config.seed).shuffle(conversations)
    num_held_out = min(config.held_out, max(1, len(conversations) // 10))
    if len(conversations) == 1:
        conversations *= 2
    kept, trained = conversations[:num_held_out], conversations[num_held_out:]
    examples, summary = encode_all(trained, tokenizer, config)
    if process.is_main:
        console.print(f"data        {summary}", markup=False, highlight=False)
        print_masked(examples[0], tokenizer)
    pad = tokenizer.pad_token_id
    batches = EndlessBatches(
        len(examples),
        lambda index, epoch: examples[index],
        lambda chosen: collate(chosen, pad),
        batch_size=config.batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=config.seed,
    )
    try:
        left_out, _ = encode_all(kept, tokenizer, config)
    except RecipeError:
        left_out = []
    # Every rank evaluates all of them, so that each has as many.
    held_out = [collate(few, pad) for few in in_batches(left_out, config.batch_size)]
    return Data(batches, held_out, kept[0])


def causal_loss(wrapped: Any, padding_free: str) -> Callable[[Batch, torch.Tensor], torch.Tensor]:
    """Cross-entropy of the next token over a batch's trained tokens: sum / total."""
    packs = packs_batches(wrapped, padding_free)

    def loss_share(batch: Batch, total: torch.Tensor) -> torch.Tensor:
        plan = {BATCH_KEY: batch.packing} if packs else {}
        # The model's own loss in place of one made of its logits: without padding nobody needs
        # logits of [batch, longest, vocabulary].
        loss: torch.Tensor = wrapped(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            labels=batch.labels,
            num_items_in_batch=total,
            use_cache=False,
            **plan,
        ).loss
        return loss

    return loss_share


def packs_batches(wrapped: Any, padding_free: str) -> bool:
    """Whether the model trains without padding from now on."""
    try:
        return pack_batches(wrapped, padding_free)
    except IntegrationError as error:
        raise RecipeError(str(error)) from error
