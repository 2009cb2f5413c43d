# SPDX-License-Identifier: Apache-2.0
"""Preference data: a question, an answer that is preferred and one that is not."""

from dataclasses import dataclass
from typing import Any

from deepytorch.recipes.base import fields
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.data.conversations import Conversation, Reader
from deepytorch.recipes.data.records import Records, first_records, read_records

_ANSWERS = ("chosen", "rejected")
_SHARED = (*fields.SYSTEM, *fields.OPTIONS)


@dataclass(frozen=True)
class Pair:
    """Two conversations that differ in the last answer alone, which alone is trained."""

    chosen: Conversation
    rejected: Conversation


def read_pairs(data: str) -> tuple[list[Pair], list[str]]:
    """The pairs in ``data``, see `records.read_records`, and the fields that were left out.

    A record has "chosen" and "rejected": two texts beside a "prompt", or beside alpaca's
    "instruction"; two lists of messages beside a "prompt" of messages; two whole conversations; or
    ShareGPT's two turns beside "conversations". Raises RecipeError naming the place and the field
    that is wrong.
    """
    return _read(read_records(data))


def refuse_wrong_pairs(data: str) -> None:
    """RecipeError if ``data`` is missing, of a kind that isn't read, or its first pairs wrong."""
    _read(first_records(data))


def _read(records: Records) -> tuple[list[Pair], list[str]]:
    reader, unknown = Reader(), dict[str, None]()
    pairs = []
    for where, record in records:
        fields.require_object(record, where)
        given = _given(record, where)
        shared = {name: record[name] for name in _SHARED if fields.is_given(record.get(name))}
        read = reader.alpaca if "instruction" in given else reader.prompt
        answer = "output" if "instruction" in given else "completion"
        chosen, rejected = (
            read({**shared, **given, answer: reply}, where) for reply in _answers(record, where)
        )
        pairs.append(Pair(chosen, rejected))
        known = {*_ANSWERS, *_SHARED, "prompt", "instruction", "input", "conversations"}
        unknown |= dict.fromkeys(
            name for name in record if name not in known and fields.is_given(record[name])
        )
    return pairs, [*unknown, *(f"{field} of turns" for field in reader.unknown_in_turns)]


def _answers(record: dict[str, Any], where: str) -> list[Any]:
    """Return the chosen and the rejected answer, as texts, or as turns behind the given ones."""
    found: list[Any] = []
    for name in _ANSWERS:
        value = record.get(name)
        if isinstance(value, dict):  # ShareGPT's turn
            value = [value]
        if not (isinstance(value, str) and value.strip()) and not (
            isinstance(value, list) and value
        ):
            problem = f"is a {type(value).__name__}" if name in record else "is missing"
            raise RecipeError(
                f'{where}: field "{name}" {problem}; "chosen" and "rejected" must be two texts, or '
                f"two lists of messages. Fields found: {', '.join(map(str, record)) or 'none'}"
            )
        found.append(value)
    first, second = found
    if isinstance(first, list) != isinstance(second, list):
        raise RecipeError(f'{where}: "chosen" is a list and "rejected" a text, or the other way')
    if first == second:
        raise RecipeError(f'{where}: "chosen" and "rejected" are the same: leave the record out')
    shared = _num_shared(first, second) if _is_whole(record) else 0
    return [answer[shared:] if shared else answer for answer in found]


def _given(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return what both answers are given to, as fields of the formats that `Reader` reads."""
    if "instruction" in record:
        return {name: record[name] for name in ("instruction", "input") if name in record}
    if isinstance(record.get("conversations"), list):
        return {"prompt": record["conversations"]}
    if _is_whole(record):
        first, second = record["chosen"], record["rejected"]
        shared = _num_shared(first, second) if isinstance(second, list) else 0
        if shared == 0:
            raise RecipeError(
                f'{where}: "chosen" and "rejected" begin otherwise: both must begin with the same '
                'question, or stand beside a "prompt"'
            )
        return {"prompt": first[:shared]}
    if not fields.is_given(record.get("prompt")):
        raise RecipeError(
            f'{where}: no question. A pair needs "prompt", "instruction" or "conversations" '
            'beside "chosen" and "rejected", or both as whole conversations'
        )
    return {"prompt": record["prompt"]}


def _is_whole(record: dict[str, Any]) -> bool:
    """Whether the answers are conversations with the question in them, as some data has them
    beside a "prompt" that is the question's text."""
    chosen = record.get("chosen")
    is_listed = isinstance(chosen, list) and not isinstance(record.get("prompt"), list)
    return is_listed and not isinstance(record.get("conversations"), list)


def _num_shared(first: list[Any], second: list[Any]) -> int:
    """So many turns at the beginning are the same; a last one of either is an answer."""
    number = 0
    most = min(len(first), len(second)) - 1
    while number < most and first[number] == second[number]:
        number += 1
    return number
