# SPDX-License-Identifier: Apache-2.0
"""Readers of instruction data: alpaca and ShareGPT, as .json, .jsonl or .parquet."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepytorch.recipes._config import RecipeError
from deepytorch.recipes._data import InstructionPair

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}


@dataclass(frozen=True)
class Message:
    """One turn; ``role`` is system, user or assistant."""

    role: str
    content: str


Conversation = tuple[Message, ...]

_PAIR = ("user", "assistant")
_LINES_WAY_OUT = "(one record a line is read from a file that ends in .jsonl)"


def read_conversations(path: Path, data_format: str = "auto") -> list[Conversation]:
    """The conversations in a file; "auto" tells the format by the first record's fields.

    Answers may be empty: see `has_empty_answer`.

    Alpaca: "instruction", "output", and perhaps "input", "system" and "history", a list of earlier
    questions with their answers. ShareGPT: "conversations" of "from" and
    "value", or "messages" of "role" and "content". Raises RecipeError naming the file, the line and
    the field that is wrong.
    """
    records = _records(path)
    if data_format == "auto":
        first = records[0][1]
        fields = first if isinstance(first, dict) else {}
        is_alpaca = _first_of(fields, "conversations", "messages") is None
        data_format = "alpaca" if is_alpaca else "sharegpt"
    read: Callable[[Any, str], Conversation] = _sharegpt if data_format == "sharegpt" else _alpaca
    return [read(record, f"{path}, {where}") for where, record in records]


def has_empty_answer(conversation: Conversation) -> bool:
    """Whether a turn of the assistant says nothing, so that its end alone would be trained."""
    return any(one.role == "assistant" and not one.content.strip() for one in conversation)


def _records(path: Path) -> list[tuple[str, Any]]:
    """Each record of the file with the place it has there."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".jsonl", ".parquet"):
        raise RecipeError(
            f"data={path} must end in .json (a list of records), .jsonl (one record a line) or "
            ".parquet"
        )
    if suffix == ".parquet":
        records = _parquet(path)
    else:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"cannot read data={path}: {error}") from error
        records = list(_lines(text, path) if suffix == ".jsonl" else _list(text, path))
    if not records:
        raise RecipeError(f"{path} holds no records")
    return records


def _lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    # Not splitlines: JSON's strings may hold the other characters that it cuts at.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _parsed(json.loads, line, path, number)


def _list(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """The items of a JSON list, each with the line it begins on."""
    if not text.lstrip().startswith("["):
        loaded = _parsed(json.loads, text, path, 1)
        raise RecipeError(
            f"{path} must hold a JSON list of records, not a {type(loaded).__name__} "
            f"{_LINES_WAY_OUT}"
        )
    # First the syntax alone: only a record's own line says where a number is too long.
    records = _parsed(partial(json.loads, parse_int=len), text, path, 1)
    decoder, end, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    for index in range(len(records)):
        while text[end] in " \t\r\n,":
            end += 1
        line, counted = line + text.count("\n", counted, end), end
        record, end = _parsed(partial(decoder.raw_decode, idx=end), text, path, line)
        yield f"line {line}, record {index}", record


def _parsed(parse: Callable[[str], Any], text: str, path: Path, first_line: int) -> Any:
    try:
        return parse(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        is_lines = error.msg == "Extra data" and path.suffix.lower() == ".json"
        raise RecipeError(
            f"{path} is not valid JSON at line {line}, column {error.colno}: {error.msg}"
            f"{f' {_LINES_WAY_OUT}' if is_lines else ''}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number too long, lists too deep
        raise RecipeError(f"{path} cannot be read at line {first_line}: {error}") from error


def _parquet(path: Path) -> list[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise RecipeError(f"reading {path} needs pyarrow: pip install pyarrow") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise RecipeError(f"cannot read data={path}: {error}") from error
    return [(f"row {index}", row) for index, row in enumerate(rows)]


def _alpaca(record: Any, where: str) -> Conversation:
    last = as_conversation(_pair(record, where))
    system, history = _first_of(record, "system") or "", _first_of(record, "history") or []
    if not isinstance(system, str):
        raise RecipeError(f'{where}: field "system" is a {type(system).__name__}, not a text')
    turns = [("system", system)] if system.strip() else []
    for pair in history if isinstance(history, list) else [history]:
        if not (
            isinstance(pair, (list, tuple))
            and len(pair) == len(_PAIR)
            and all(isinstance(text, str) for text in pair)
        ):
            raise RecipeError(
                f'{where}: field "history" must be a list of pairs of texts, a question and its '
                f"answer; it has {pair!r:.60}"
            )
        turns += zip(_PAIR, pair, strict=True)
    for role, text in turns:
        _refuse_half_characters(text, f"{where}: what the {role} says")
    return (*(Message(role, text) for role, text in turns), *last)


def as_conversation(pair: InstructionPair) -> Conversation:
    """Question and answer; alpaca's "input" follows the instruction."""
    question = f"{pair.instruction}\n\n{pair.context}" if pair.context else pair.instruction
    return (Message("user", question), Message("assistant", pair.response))


def _pair(record: Any, where: str) -> InstructionPair:
    _require_object(record, where)
    values = {}
    for field, required in (("instruction", True), ("input", False), ("output", True)):
        value = record.get(field)
        if value is None and not required:
            value = ""
        if not isinstance(value, str):
            problem = f"is a {type(value).__name__}" if field in record else "is missing"
            raise RecipeError(
                f'{where}: field "{field}" {problem}; it must be a text. '
                f"Fields found: {', '.join(map(str, record)) or 'none'}"
            )
        if field == "instruction" and not value.strip():
            raise RecipeError(f'{where}: field "{field}" is empty')
        _refuse_half_characters(value, f'{where}: field "{field}"')
        values[field] = value
    return InstructionPair(values["instruction"], values["input"], values["output"])


def _sharegpt(record: Any, where: str) -> Conversation:
    _require_object(record, where)
    turns = _first_of(record, "conversations", "messages")
    if not isinstance(turns, list) or not turns:
        raise RecipeError(
            f'{where}: needs a list "conversations" or "messages". '
            f"Fields found: {', '.join(map(str, record)) or 'none'}"
        )
    messages = []
    for number, turn in enumerate(turns):
        here = f"{where}, turn {number}"
        _require_object(turn, here)
        who, role = _named(turn, "from", "role")
        what, content = _named(turn, "value", "content")
        if not isinstance(role, str) or role not in ROLES:
            raise RecipeError(f'{here}: "{who}" is {role!r}; known: {", ".join(ROLES)}')
        if not isinstance(content, str):
            raise RecipeError(f'{here}: "{what}" must be a text, not a {type(content).__name__}')
        _refuse_half_characters(content, f'{here}: "{what}"')
        messages.append(Message(ROLES[role], content))
    if not any(one.role == "assistant" for one in messages):
        raise RecipeError(f"{where}: no turn of the assistant, so there is nothing to learn")
    return tuple(messages)


def _first_of(record: dict[str, Any], *fields: str) -> Any:
    return _named(record, *fields)[1]


def _named(record: dict[str, Any], *fields: str) -> tuple[str, Any]:
    """The first of the fields that has a value, with its name; else one that is there at all.

    Tables fill what a record lacks with null.
    """
    there = [field for field in fields if field in record] or fields
    name = next((field for field in there if record.get(field) is not None), there[0])
    return name, record.get(name)


def _refuse_half_characters(text: str, place: str) -> None:
    # JSON may have "\ud800", a half of a pair, alone. Tokenizers read UTF-8, which can't.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise RecipeError(
            f"{place} has half a character, {half!r}: mend it, or leave the record out"
        ) from error


def _require_object(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: expected an object, found a {type(value).__name__}")
