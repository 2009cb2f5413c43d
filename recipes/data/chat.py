# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens: the model's own chat template, and labels on the answers alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.panel import Panel
from rich.text import Text

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import console
from deepytorch.recipes.data.conversations import (
    Conversation,
    Conversations,
    InstructionPair,
    as_conversation,
    read_conversations,
)
from deepytorch.recipes.data.template import Chat
from deepytorch.recipes.data.text import IGNORED_LABEL, Example, standard_library_pairs

__all__ = [
    "Conversation",
    "Encoded",
    "TooLongError",
    "encode",
    "encode_one",
    "fitting",
    "load_conversations",
    "prompt_of",
]


class TooLongError(RecipeError):
    """All answers begin beyond the length that is trained."""


class Encoding(Protocol):
    """The options that decide how text becomes examples."""

    @property
    def max_length(self) -> int: ...
    @property
    def train_on_prompt(self) -> bool: ...


def load_conversations(data: str | None, data_format: str = "auto") -> Conversations:
    """Those in the file ``data``, or the embedded ones when it is None."""
    if data is None:
        return Conversations([as_conversation(pair) for pair in standard_library_pairs()])
    return read_conversations(Path(data), data_format)


def plain_text(conversation: Conversation) -> list[tuple[str, bool]]:
    """Pieces (text, whether an answer) for models without a chat template, in alpaca's words.

    Raises RecipeError for what has no place in a plain text.
    """
    if conversation.is_text:
        return [
            (message.content or "", message.role == "assistant")
            for message in conversation.messages
        ]
    pieces: list[tuple[str, bool]] = []
    before = ""
    for number, message in enumerate(conversation.messages):
        _refuse_in_plain(f"turn {number}", *message.extras)
        if message.role == "tool":
            _refuse_in_plain(f"turn {number}", "tool")
        role = "system" if message.role == "developer" else message.role
        text = message.content or ""
        if role == "system":
            text += "\n\n"
        elif role == "user":
            text = InstructionPair(text, "", "").prompt()
        is_answer = role == "assistant"
        if before == "system" and not is_answer:
            text = pieces.pop()[0] + text  # as one text it may be other tokens than as two
        pieces.append((text, is_answer))
        before = role
    _refuse_in_plain("the record", *conversation.options)
    return pieces


def _refuse_in_plain(what: str, *names: str) -> None:
    if names:
        raise RecipeError(
            f'{what}: "{names[0]}" has no place in a text without a chat template, which this '
            "model's tokenizer lacks: leave it out of the data, or give a model with one"
        )


def prompt_of(conversation: Conversation, tokenizer: Any) -> str:
    """Return what a model is given to write the last answer; special tokens are part of it.

    Empty if nobody spoke before the answer. Raises RecipeError if there is no conversation.
    """
    turns = conversation.messages
    if not turns:
        raise RecipeError("no conversation is left out of training to take a question from")
    asked = replace(conversation, messages=turns[:-1] if turns[-1].role == "assistant" else turns)
    if not asked.messages:
        return ""
    if is_plain(asked, tokenizer):
        text = "".join(piece for piece, _ in plain_text(asked))
        return (tokenizer.bos_token or "") + text
    return Chat(asked, tokenizer, trained=False).prompt()


def is_plain(conversation: Conversation, tokenizer: Any) -> bool:
    """Whether no chat template has a part in how the conversation is written."""
    return conversation.is_text or tokenizer.chat_template is None


class Encoded(NamedTuple):
    """A conversation as tokens.

    Attributes:
        example: token ids, and labels on what the assistant says and on the token that ends it.
        is_cut: whether it had to be cut to ``max_length`` tokens.
        num_thoughts: so many turns' thoughts the chat template drops, as of earlier answers.
    """

    example: Example
    is_cut: bool
    num_thoughts: int


def encode(conversation: Conversation, tokenizer: Any, options: Encoding) -> Encoded:
    """The conversation as tokens. Raises RecipeError for what would be left out without a word."""
    if options.train_on_prompt and any(message.is_skipped for message in conversation.messages):
        raise RecipeError(
            "a turn's weight says not to train it, and train_on_prompt=true trains all of them: "
            "leave one of the two out"
        )
    num_thoughts = 0
    if is_plain(conversation, tokenizer):
        ids, trained = _encode_plain(conversation, tokenizer)
    else:
        chat = Chat(conversation, tokenizer)
        num_thoughts = chat.refuse_left_out()
        ids, trained = _encode_chat(chat, tokenizer, masked=not options.train_on_prompt)
    if options.train_on_prompt:
        trained = [True] * len(ids)
    labels = [
        token if wanted else IGNORED_LABEL for token, wanted in zip(ids, trained, strict=True)
    ]
    limit = options.max_length
    return Encoded(Example(ids[:limit], labels[:limit]), len(ids) > limit, num_thoughts)


def _encode_plain(conversation: Conversation, tokenizer: Any) -> tuple[list[int], list[bool]]:
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    trained = [False] * len(ids)
    pieces = plain_text(conversation)
    spoken = iter(
        index for index, message in enumerate(conversation.messages) if message.role == "assistant"
    )
    for text, is_answer in pieces:
        piece = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        piece = [*piece, tokenizer.eos_token_id] if is_answer else piece
        ids += piece
        is_trained = is_answer and next(spoken) in conversation.answers
        trained += [is_trained] * len(piece)
    return ids, trained


def _encode_chat(chat: Chat, tokenizer: Any, *, masked: bool) -> tuple[list[int], list[bool]]:
    if masked and not tokenizer.is_fast:
        raise RecipeError(
            "the tokenizer does not say where in the text its tokens lie, so answers can't be told "
            "from questions: give the model a fast tokenizer, or set train_on_prompt=true"
        )
    if masked and chat.says_what_is_answered:
        return chat.encoded_by_template()
    spans = chat.answers() if masked else []
    # Not verbose, else it warns of a length that the examples are cut to below.
    found = tokenizer(
        chat.text, add_special_tokens=False, return_offsets_mapping=masked, verbose=False
    )
    trained = [
        any(start < last and first < end for start, end in spans)
        for first, last in found.get("offset_mapping", ())
    ]
    return list(found["input_ids"]), trained


def encode_one(conversation: Conversation, tokenizer: Any, options: Encoding) -> Encoded:
    """As `encode`; the RecipeError says the conversation's place in the data."""
    try:
        return encode(conversation, tokenizer, options)
    except RecipeError as error:
        raise RecipeError(f"{conversation.where}: {error}") from error


def fitting(encoded: Sequence[Encoded], options: Encoding) -> tuple[list[Example], str]:
    """The examples without those whose prompt alone fills the length, and a sentence of counts.

    Raises TooLongError when nothing is left.
    """
    examples: list[Example] = []
    num_truncated = num_thoughts = 0
    for example, is_cut, dropped in encoded:
        # The first token has none before it to be predicted from.
        if any(label != IGNORED_LABEL for label in example.labels[1:]):
            examples.append(example)
            num_truncated += is_cut
            num_thoughts += dropped
    if not examples:
        raise TooLongError(
            f"no answer begins within max_length={options.max_length} tokens: increase it"
        )
    lengths = sorted(len(example.input_ids) for example in examples)
    summary = (
        f"{len(examples)} examples, median {lengths[len(lengths) // 2]} tokens, longest "
        f"{lengths[-1]}; {num_truncated} truncated to max_length={options.max_length}, "
        f"{len(encoded) - len(examples)} left out because their prompt alone is longer"
    )
    if num_thoughts:
        summary += f"; the chat template drops the thoughts of {num_thoughts} earlier turns"
    return examples, summary


def print_masked(example: Example, tokenizer: Any) -> None:
    """Show one example as the model gets it; what it is not trained to write is grey."""
    text = Text()
    pairs = list(zip(example.input_ids, example.labels, strict=True))
    start = 0
    while start < len(pairs):
        masked = pairs[start][1] == IGNORED_LABEL
        end = start
        while end < len(pairs) and (pairs[end][1] == IGNORED_LABEL) == masked:
            end += 1
        piece = tokenizer.decode([token for token, _ in pairs[start:end]])
        text.append(piece, style="bright_black" if masked else "")
        start = end
    if len(text) > 1200:
        text = text[:1200].append(" ...", style="bright_black")
    console.print(Panel(text, title="one example; the grey part is not trained"))
