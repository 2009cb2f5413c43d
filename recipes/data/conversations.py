# SPDX-License-Identifier: Apache-2.0
"""Instruction data as conversations: alpaca, ShareGPT, OpenAI's messages, prompt and completion."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepytorch.recipes.base import fields
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.fields import one_of, require_object, text_of
from deepytorch.recipes.data.records import first_records, read_records

ROLES = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}
_PAIR = ("user", "assistant")


@dataclass(frozen=True)
class InstructionPair:
    """One record in alpaca's sense; ``context`` is alpaca's "input" and may be empty."""

    instruction: str
    context: str
    response: str

    def prompt(self) -> str:
        """The text before the answer, which the model reads but is not trained to write."""
        context = f"\n\n### Input:\n{self.context}" if self.context else ""
        return f"### Instruction:\n{self.instruction}{context}\n\n### Response:\n"


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: system, developer, user, assistant or tool.
        content: its text; None where the assistant only calls tools.
        extras: what chat templates read besides, by their names, such as "tool_calls".
        is_skipped: whether the data says of an answer that it is not to be trained.
    """

    role: str
    content: str | None
    extras: Mapping[str, Any] = field(default_factory=dict)
    is_skipped: bool = False

    def for_template(self) -> dict[str, Any]:
        """The turn as chat templates read it."""
        content = {} if self.content is None else {"content": self.content}
        return {"role": self.role, **content, **self.extras}


@dataclass(frozen=True)
class Conversation:
    """A record.

    Attributes:
        messages: its turns.
        options: what the chat template is given besides, such as "tools".
        num_given: so many turns at the beginning are given; the answers among them aren't trained.
        is_text: whether they are a text and its end, without any words of a template between them.
        where: file and place, for errors.
    """

    messages: tuple[Message, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    num_given: int = 0
    is_text: bool = False
    where: str = field(default="the conversation", compare=False)

    @property
    def answers(self) -> list[int]:
        """Return the turns that are trained."""
        return [
            index
            for index, message in enumerate(self.messages)
            if index >= self.num_given and message.role == "assistant" and not message.is_skipped
        ]


@dataclass(frozen=True)
class Conversations:
    """The conversations of a file, and its fields that no format knows, of records and turns."""

    found: list[Conversation]
    unknown: tuple[str, ...] = ()
    unknown_in_turns: tuple[str, ...] = ()


def has_empty_answer(conversation: Conversation) -> bool:
    """Whether a trained turn of the assistant says nothing, so that its end alone would be."""
    turns = [conversation.messages[index] for index in conversation.answers]
    return any(not (turn.content or "").strip() and not turn.extras for turn in turns)


def as_conversation(pair: InstructionPair, where: str = "the embedded data") -> Conversation:
    """Question and answer; alpaca's "input" follows the instruction."""
    question = f"{pair.instruction}\n\n{pair.context}" if pair.context else pair.instruction
    turns = (Message("user", question), Message("assistant", pair.response))
    return Conversation(turns, where=where)


def read_conversations(data: str | Path, data_format: str = "auto") -> Conversations:
    """The conversations in a file; "auto" tells the format by the first record's fields.

    Answers may be empty: see `has_empty_answer`.

    * alpaca: "instruction", "output", and perhaps "input" and "history", a list of earlier
      questions with their answers.
    * sharegpt: "conversations" of "from" and "value", or "messages" of "role" and "content", as
      OpenAI has them.
    * prompt: "prompt" and "completion", two texts or two lists of messages.

    All may have "system", "tools" and what else `fields` honours. Raises RecipeError naming the
    file, the line and the field that is wrong, or can't be honoured.
    """
    return _read(read_records(str(data)), data_format)


def _read(records: list[tuple[str, Any]], data_format: str) -> Conversations:
    chosen = _format_of(*records[0]) if data_format == "auto" else data_format
    reader = Reader()
    read: Callable[[Any, str], Conversation] = getattr(reader, chosen)
    found = []
    for where, record in records:
        require_object(record, where)
        if data_format == "auto":
            _format_of(where, record)
        found.append(read(record, where))
    return Conversations(found, tuple(reader.unknown), tuple(reader.unknown_in_turns))


def refuse_wrong_data(data: str, data_format: str) -> None:
    """RecipeError if ``data`` is missing, of a kind that isn't read, or its first records wrong."""
    records = first_records(data)
    if records:
        _read(records, data_format)


def _format_of(where: str, record: Any) -> str:
    require_object(record, where)
    there = {name for name, value in record.items() if value is not None}
    found = [
        name
        for name, is_it in (
            ("alpaca", "instruction" in there),
            ("sharegpt", there & {"conversations", "messages"}),
            ("prompt", there >= {"prompt", "completion"}),
        )
        if is_it
    ]
    if not found and "text" in there:  # many data sets have it beside what it was made of
        return "text"
    if len(found) > 1:
        raise RecipeError(
            f"{where}: it has the fields of {' and of '.join(found)}: say which are meant, "
            f"data_format={found[0]} or data_format={found[1]}"
        )
    if not found:
        raise RecipeError(
            f'{where}: no format that is known. It needs "instruction" and "output", '
            '"conversations" or "messages", "prompt" and "completion", or "text". '
            f"Fields found: {_names(record)}"
        )
    return found[0]


def _names(record: dict[str, Any]) -> str:
    return ", ".join(map(str, record)) or "none"


class Reader:
    """Reads records of each format, by its name, and notes fields that none knows."""

    def __init__(self) -> None:
        self.unknown: dict[str, None] = {}
        self.unknown_in_turns: dict[str, None] = {}

    def alpaca(self, record: dict[str, Any], where: str) -> Conversation:
        """An instruction and its answer, after what was said before."""
        known = ("instruction", "input", "output", "history", *fields.SYSTEM, *fields.OPTIONS)
        self._note(record, where, known)
        last = as_conversation(_pair(record, where)).messages
        turns = []
        history = record.get("history") or []
        for pair in history if isinstance(history, list) else [history]:
            if not (
                isinstance(pair, (list, tuple))
                and len(pair) == len(_PAIR)
                and all(isinstance(text, str) for text in pair)
            ):
                raise RecipeError(
                    f'{where}: field "history" must be a list of pairs of texts, a question and '
                    f"its answer; it has {pair!r:.60}"
                )
            for role, text in zip(_PAIR, pair, strict=True):
                fields.refuse_half_characters(text, f"{where}: what the {role} says")
                turns.append(Message(role, text))
        return _conversation([*turns, *last], record, where)

    def sharegpt(self, record: dict[str, Any], where: str) -> Conversation:
        """A list of turns, of anybody in any order."""
        lists = ("conversations", "messages")
        self._note(record, where, (*lists, *fields.SYSTEM, *fields.OPTIONS))
        turns = one_of(record, where, *lists)[1]
        if not isinstance(turns, list) or not turns:
            raise RecipeError(
                f'{where}: needs a list "conversations" or "messages". '
                f"Fields found: {_names(record)}"
            )
        return _conversation(self._turns(turns, where), record, where)

    def prompt(self, record: dict[str, Any], where: str) -> Conversation:
        """Read what is given and what is learned, as two texts or two lists of messages."""
        if isinstance(record.get("label"), bool):
            raise RecipeError(
                f'{where}: "label" is not honoured, as answers are trained, not what is said of '
                "them. Leave out the records that are no good, and the field"
            )
        self._note(record, where, ("prompt", "completion", *fields.SYSTEM, *fields.OPTIONS))
        given, learned = record.get("prompt"), record.get("completion")
        if isinstance(given, list) and isinstance(learned, list) and learned:
            before = self._turns(given, f'{where}, "prompt"')
            turns = before + self._turns(learned, f'{where}, "completion"')
            return _conversation(turns, record, where, num_given=len(before))
        for name, value in (("prompt", given), ("completion", learned)):
            if not isinstance(value, str):
                problem = f"is a {type(value).__name__}" if name in record else "is missing"
                raise RecipeError(
                    f'{where}: field "{name}" {problem}; "prompt" and "completion" must be two '
                    f"texts, or two lists of messages. Fields found: {_names(record)}"
                )
        for name in (*fields.SYSTEM, *fields.OPTIONS):
            if fields.is_given(record.get(name)):
                raise RecipeError(
                    f'{where}: "{name}" has no place beside a prompt that is a text: give "prompt" '
                    'and "completion" as lists of messages'
                )
        turns = [
            Message("user", text_of(given, f'{where}: field "prompt"')),
            Message("assistant", text_of(learned, f'{where}: field "completion"')),
        ]
        return Conversation(tuple(turns), is_text=True, where=where)

    def text(self, record: dict[str, Any], where: str) -> Conversation:
        """A text that is trained as it is, and its end."""
        self._note(record, where, ("text",))
        text = text_of(record.get("text"), f'{where}: field "text"')
        return Conversation((Message("assistant", text),), is_text=True, where=where)

    def _note(self, record: dict[str, Any], where: str, known: tuple[str, ...]) -> None:
        fields.note_others(record, where, known, fields.REFUSED_IN_RECORDS, self.unknown)

    def _turns(self, turns: list[Any], where: str) -> list[Message]:
        return [self._turn(turn, f"{where}, turn {number}") for number, turn in enumerate(turns)]

    def _turn(self, turn: Any, here: str) -> Message:
        require_object(turn, here)
        fields.note_turn(turn, here, ("from", "role", "value", "content"), self.unknown_in_turns)
        who, told = one_of(turn, here, "from", "role")
        what, content = one_of(turn, here, "value", "content")
        if not isinstance(told, str) or told not in ROLES:
            raise RecipeError(f'{here}: "{who}" is {told!r}; known: {", ".join(ROLES)}')
        role = ROLES[told]
        extras = fields.extras_of(turn, here, role)
        if told == "function_call":
            if fields.CALLS in extras:
                raise RecipeError(f'{here}: "{fields.CALLS}" beside a call: leave one of them out')
            extras[fields.CALLS], content = fields.calls_of(content, f'{here}: "{what}"'), None
        is_trained = fields.weight_of(turn, here, is_answer=role == "assistant")
        if content is not None or fields.CALLS not in extras:
            content = text_of(content, f'{here}: "{what}"')
        return Message(role, content, extras, role == "assistant" and not is_trained)


def _conversation(
    turns: list[Message], record: dict[str, Any], where: str, *, num_given: int = 0
) -> Conversation:
    """The turns after what the system says beside them."""
    system = fields.system_of(record, where)
    if system.strip():
        if turns[0].role in ("system", "developer") and turns[0].content != system:
            raise RecipeError(
                f"{where}: the system says something beside the turns and something else in the "
                "first of them: leave one out, or put both in one text"
            )
        if turns[0].role not in ("system", "developer"):
            turns, num_given = [Message("system", system), *turns], num_given and num_given + 1
    options = fields.options_of(record, where)
    found = Conversation(tuple(turns), options, num_given, where=where)
    if not found.answers:
        raise RecipeError(
            f"{where}: no turn of the assistant is trained, so there is nothing to learn"
        )
    return found


def _pair(record: dict[str, Any], where: str) -> InstructionPair:
    values = {}
    for name, required in (("instruction", True), ("input", False), ("output", True)):
        value = record.get(name)
        if value is None and not required:
            value = ""
        if not isinstance(value, str):
            problem = f"is a {type(value).__name__}" if name in record else "is missing"
            raise RecipeError(
                f'{where}: field "{name}" {problem}; it must be a text. '
                f"Fields found: {_names(record)}"
            )
        if name == "instruction" and not value.strip():
            raise RecipeError(f'{where}: field "{name}" is empty')
        fields.refuse_half_characters(value, f'{where}: field "{name}"')
        values[name] = value
    return InstructionPair(values["instruction"], values["input"], values["output"])
