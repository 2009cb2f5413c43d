# SPDX-License-Identifier: Apache-2.0
"""Parts that instruction recipes share: their options, their data, and the loss of the answers."""

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepytorch.integrations.transformers import BATCH_KEY, IntegrationError, pack_batches
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process, console, together
from deepytorch.recipes.data.balance import StepBalance
from deepytorch.recipes.data.batches import EndlessBatches, hold_out, in_batches
from deepytorch.recipes.data.chat import (
    Conversation,
    TooLongError,
    fitting,
    load_conversations,
    print_masked,
)
from deepytorch.recipes.data.conversations import Conversations, has_empty_answer
from deepytorch.recipes.data.encoding import encoded_by_all
from deepytorch.recipes.data.settings import TextOptions
from deepytorch.recipes.data.text import Example, TextBatch, collate
from deepytorch_core.base import decisions
from deepytorch_core.data.balance import WHAT


@dataclass(frozen=True)
class InstructionData:
    """This rank's batches, and what is kept out of training."""

    batches: EndlessBatches[TextBatch]
    balanced: EndlessBatches[TextBatch] | None
    held_out: list[TextBatch]
    sample: Conversation  # one that is kept out; without turns where none is
    longest: int  # tokens of an example


def prepare_data(config: TextOptions, tokenizer: Any, process: Process) -> InstructionData:
    """Read, shuffle, split and encode ``config.data``; says what was cut, left and held out."""
    loaded = together(lambda: load_conversations(config.data, config.data_format), process)
    conversations = loaded.found
    order = [
        number
        for number, conversation in enumerate(conversations)
        if not has_empty_answer(conversation)
    ]
    num_empty = len(conversations) - len(order)
    if not order:
        raise RecipeError(
            f"data={config.data} has nothing to learn: in each of its {num_empty} examples an "
            "answer is empty. Give the answers a text"
        )
    random.Random(config.seed).shuffle(order)
    kept, trained, told = hold_out(order, config.held_out)

    encoded = encoded_by_all(
        [conversations[number] for number in order], tokenizer, config, process
    )
    examples, summary = fitting(encoded[len(kept) :], config)
    try:
        left_out = fitting(encoded[: len(kept)], config)[0] if kept else []
    except TooLongError:
        left_out = []
    if num_empty:
        summary += f", {num_empty} because an answer is empty"
    if len(left_out) < len(kept):
        told += f", {len(kept) - len(left_out)} of these left out because of a longer prompt"
    if process.is_main:
        console.print(f"data        {summary}; {told}", highlight=False)
        _say_unknown(loaded)
        if kept and not left_out:
            console.print(
                "held out    no loss is computed: the prompts of all held-out examples fill "
                f"max_length={config.max_length} tokens",
                highlight=False,
            )
        print_masked(examples[0], tokenizer)
    pad = tokenizer.pad_token_id
    fixed = config.packing == "fixed"
    rows = fill_rows(examples, config.max_length) if fixed else [[example] for example in examples]
    if fixed and process.is_main:
        console.print(f"packing     {len(rows)} rows of up to {config.max_length} tokens")

    lengths = [sum(len(example.input_ids) for example in row) for row in rows]

    def batches_with(balance: StepBalance | None) -> EndlessBatches[TextBatch]:
        return EndlessBatches(
            len(rows),
            lambda index, epoch: rows[index],
            lambda chosen: collate([example for row in chosen for example in row], pad),
            batch_size=config.batch_size,
            rank=process.rank,
            world_size=process.world_size,
            seed=config.seed,
            balance=balance,
            lengths=lengths,
            what="rows" if fixed else "examples",
        )

    balanced = None
    why_not = config.why_no_balance(process.world_size)
    if why_not is None:
        balanced = batches_with(
            StepBalance(lengths, world_size=process.world_size, accumulation=config.accumulation)
        )
    elif config.backend == "deepytorch":
        decisions.record(WHAT, "off", why_not)
    # Every rank evaluates all of them, so that each has as many.
    held_out = [collate(few, pad) for few in in_batches(left_out, config.batch_size)]
    longest = max(len(example.input_ids) for example in (*examples, *left_out))
    sample = conversations[kept[0]] if kept else Conversation()
    return InstructionData(batches_with(None), balanced, held_out, sample, longest)


def _say_unknown(loaded: Conversations) -> None:
    """Name, once, the fields that no format knows: their texts are not trained."""
    told = [
        f"{', '.join(names)}{where}"
        for names, where in ((loaded.unknown, ""), (loaded.unknown_in_turns, " of turns"))
        if names
    ]
    if told:
        console.print(
            f"left out    fields that no format of data knows: {'; '.join(told)}", highlight=False
        )


def fill_rows(examples: Sequence[Example], length: int) -> list[list[Example]]:
    """Examples dealt out to rows of up to ``length`` tokens: the longest first, each where least
    room is left (best fit decreasing)."""
    rows: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for example in sorted(examples, key=lambda item: len(item.input_ids), reverse=True):
        needed = len(example.input_ids)
        place = bisect.bisect_left(room, (needed, -1))
        if place == len(room):
            rows.append([])
            left, row = length, len(rows) - 1
        else:
            left, row = room.pop(place)
        rows[row].append(example)
        bisect.insort(room, (left - needed, row))
    return rows


def causal_loss(
    wrapped: Any, padding_free: str
) -> Callable[[TextBatch, torch.Tensor], torch.Tensor]:
    """Cross-entropy of the next token over a batch's trained tokens: sum / total."""
    packs = packs_batches(wrapped, padding_free)

    def loss_share(batch: TextBatch, total: torch.Tensor) -> torch.Tensor:
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
