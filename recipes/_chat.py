# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens: the model's own chat template, and labels on the answers alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.panel import Panel
from rich.text import Text

from deepytorch.recipes._config import RecipeError
from deepytorch.recipes._data import (
    IGNORED_LABEL,
    Example,
    InstructionPair,
    standard_library_pairs,
)
from deepytorch.recipes._hub import reason
from deepytorch.recipes._records import (
    Conversation,
    Message,
    as_conversation,
    read_conversations,
)
from deepytorch.recipes._run import console

__all__ = [
    "Conversation",
    "Message",
    "TooLongError",
    "encode",
    "encode_all",
    "load_conversations",
    "prompt_of",
]

_MARK = "\ue000answer\ue000"  # private characters, so no template has it


class TooLongError(RecipeError):
    """All answers begin beyond the length that is trained."""


class Encoding(Protocol):
    """The options that decide how text becomes examples."""

    @property
    def max_length(self) -> int: ...
    @property
    def train_on_prompt(self) -> bool: ...


def load_conversations(data: str | None, data_format: str = "auto") -> list[Conversation]:
    """Those in the file ``data``, or the embedded ones when it is None."""
    if data is None:
        return [as_conversation(pair) for pair in standard_library_pairs()]
    return read_conversations(Path(data), data_format)


def plain_text(conversation: Conversation) -> list[tuple[str, bool]]:
    """Pieces (text, trained) for models without a chat template, in alpaca's words."""
    pieces: list[tuple[str, bool]] = []
    before = ""
    for message in conversation:
        text = message.content
        if message.role == "system":
            text += "\n\n"
        elif message.role == "user":
            text = InstructionPair(text, "", "").prompt()
        is_answer = message.role == "assistant"
        if before == "system" and not is_answer:
            text = pieces.pop()[0] + text  # as one text it may be other tokens than as two
        pieces.append((text, is_answer))
        before = message.role
    return pieces


def prompt_of(conversation: Conversation, tokenizer: Any) -> str:
    """What a model is given to write the last answer; special tokens are part of it.

    Empty where nobody spoke before the answer. Raises RecipeError where there is no conversation.
    """
    if not conversation:
        raise RecipeError("no conversation is left out of training to take a question from")
    asked = conversation[:-1] if conversation[-1].role == "assistant" else conversation
    if not asked:
        return ""
    if tokenizer.chat_template is None:
        text = "".join(piece for piece, _ in plain_text(asked))
        return (tokenizer.bos_token or "") + text
    messages = [vars(message) for message in asked]
    rendered: str = _render(tokenizer, messages, tokenize=False, add_generation_prompt=True)
    return rendered


def _render(tokenizer: Any, messages: list[dict[str, Any]], **options: bool) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template computes, so anything may go wrong in it
        raise RecipeError(
            f"the tokenizer's chat template refuses the conversation ({reason(error)}): change or "
            "leave out the turn that it refuses, or give the tokenizer another chat template"
        ) from error


def encode(conversation: Conversation, tokenizer: Any, options: Encoding) -> tuple[Example, bool]:
    """Token ids, and labels on what the assistant says and on the token that ends it.

    Also whether it had to be cut to ``options.max_length`` tokens.
    """
    if tokenizer.chat_template is None:
        ids, trained = _encode_plain(conversation, tokenizer)
    else:
        ids, trained = _encode_chat(conversation, tokenizer, masked=not options.train_on_prompt)
    if options.train_on_prompt:
        trained = [True] * len(ids)
    labels = [one if wanted else IGNORED_LABEL for one, wanted in zip(ids, trained, strict=True)]
    limit = options.max_length
    return Example(ids[:limit], labels[:limit]), len(ids) > limit


def _encode_plain(conversation: Conversation, tokenizer: Any) -> tuple[list[int], list[bool]]:
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    trained = [False] * len(ids)
    for text, answer in plain_text(conversation):
        piece = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        piece = [*piece, tokenizer.eos_token_id] if answer else piece
        ids += piece
        trained += [answer] * len(piece)
    return ids, trained


def _encode_chat(
    conversation: Conversation, tokenizer: Any, *, masked: bool
) -> tuple[list[int], list[bool]]:
    messages = [vars(message) for message in conversation]
    if masked and not tokenizer.is_fast:
        raise RecipeError(
            "the tokenizer does not say where in the text its tokens lie, so answers can't be told "
            "from questions: give the model a fast tokenizer, or set train_on_prompt=true"
        )
    marks = ("{% generation", "{%- generation")
    if masked and any(mark in tokenizer.chat_template for mark in marks):
        found = _render(
            tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), [bool(one) for one in found["assistant_masks"]]
    # The template does not say which part is the answer.
    text: str = _render(tokenizer, messages, tokenize=False)
    spans = [
        _answer(text, messages, index, tokenizer)
        for index, message in enumerate(conversation)
        if masked and message.role == "assistant"
    ]
    # Not verbose, else it warns of a length that the examples are cut to below.
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=masked, verbose=False)
    trained = [
        any(start < last and first < end for start, end in spans)
        for first, last in found.get("offset_mapping", ())
    ]
    return list(found["input_ids"]), trained


def _answer(
    text: str, messages: list[dict[str, Any]], index: int, tokenizer: Any
) -> tuple[int, int]:
    """Where an answer lies in the rendered text, with the end token behind it.

    The template may say the same words, so they are not looked for: a mark in the answer's place
    shows where it goes.
    """

    def render(some: list[dict[str, Any]], *, prompt: bool = False) -> str:
        rendered: str = _render(tokenizer, some, tokenize=False, add_generation_prompt=prompt)
        return rendered

    content = messages[index]["content"]
    marked = [*messages[:index], {**messages[index], "content": _MARK}]
    before, _, behind = render([*marked, *messages[index + 1 :]]).partition(_MARK)
    for said in (content, content.lstrip("\n"), content.strip()):  # Qwen3's takes newlines off
        if text == before + said + behind:
            end_of_turn = render(marked).partition(_MARK)[2]
            end = len(before + said) + _end_token(end_of_turn, behind, tokenizer)
            return len(before), end
    # A template that takes answers apart, for the thoughts in them, may still say where they begin.
    if index > 0:
        prompt, turn = render(messages[:index], prompt=True), render(messages[: index + 1]).rstrip()
        if prompt != render(messages[:index]) and turn.startswith(prompt) and text.startswith(turn):
            return len(prompt), len(turn)
    raise RecipeError(
        f"the tokenizer's chat template changes what the assistant says ({content[:40]!r}), so "
        "answers can't be told from questions: add {% generation %} marks to the template, or set "
        "train_on_prompt=true"
    )


def _end_token(end_of_turn: str, behind: str, tokenizer: Any) -> int:
    """How many characters the token takes that ends a turn, with the space before it.

    It stands at the end of the last turn too, where the mark of a next one does not.
    """
    closing, rest = end_of_turn.lstrip(), behind.lstrip()
    found = [
        len(token)
        for token in tokenizer.get_added_vocab()
        if closing.startswith(token) and rest.startswith(token)
    ]
    return len(behind) - len(rest) + max(found) if found else 0


def encode_all(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    options: Encoding,
    *,
    numbers: Sequence[int] | None = None,
) -> tuple[list[Example], str]:
    """Encode every conversation, leaving out those whose prompt alone fills the length.

    Also returns one sentence with the counts. Raises TooLongError when nothing is left, and
    RecipeError for one that can't be encoded, with its number among the records (from 0).
    """
    examples: list[Example] = []
    num_truncated = 0
    numbers = range(len(conversations)) if numbers is None else numbers
    for number, conversation in zip(numbers, conversations, strict=True):
        try:
            example, truncated = encode(conversation, tokenizer, options)
        except RecipeError as error:
            raise RecipeError(f"record {number} of the data (from 0): {error}") from error
        # The first token has none before it to be predicted from.
        if any(label != IGNORED_LABEL for label in example.labels[1:]):
            examples.append(example)
            num_truncated += truncated
    if not examples:
        raise TooLongError(
            f"no answer begins within max_length={options.max_length} tokens: increase it"
        )
    lengths = sorted(len(example.input_ids) for example in examples)
    summary = (
        f"{len(examples)} examples, median {lengths[len(lengths) // 2]} tokens, longest "
        f"{lengths[-1]}; {num_truncated} truncated to max_length={options.max_length}, "
        f"{len(conversations) - len(examples)} left out because their prompt alone is longer"
    )
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
        piece = tokenizer.decode([one for one, _ in pairs[start:end]])
        text.append(piece, style="bright_black" if masked else "")
        start = end
    if len(text) > 1200:
        text = text[:1200].append(" ...", style="bright_black")
    console.print(Panel(text, title="one example; the grey part is not trained"))
