# SPDX-License-Identifier: Apache-2.0
"""Honours what records and their turns have besides texts, or refuses it by name.

A field that nobody reads would be left out of training in silence. So each one that a format of
data knows is read here, or refused with the way out; all others are noted, to be told once.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from deepytorch.recipes.base.config import RecipeError

Refused = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that can't be honoured: values that ask for nothing, and the way out for all others."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
CALLS = "tool_calls"
OPTIONS = ("tools", "functions", "documents", "chat_template_kwargs")
SYSTEM = ("system", "system_prompt")

_WEIGHTS = ("weight", "loss_weight", "train", "training", "loss")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_NO_MEDIA: tuple[tuple[Any, ...], str] = ((), "texts alone are trained. Leave the record out")
_NO_CHOICE: tuple[tuple[Any, ...], str] = (
    (),
    "answers are trained, not the choice between two. Give the better one as the answer",
)
_NO_MASK: tuple[tuple[Any, ...], str] = (
    (),
    'a turn is trained or not as a whole. Use "weight": 0 in turns to leave out, and no mask',
)
_NO_SHARE: tuple[tuple[Any, ...], str] = (
    (1,),
    "all records weigh as much. Leave the field out, or the record where it weighs nothing",
)

REFUSED_IN_RECORDS: Refused = {
    **dict.fromkeys(_MEDIA, _NO_MEDIA),
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "kto_tag"), _NO_CHOICE),
    **dict.fromkeys(("completions", "completion_mask", "assistant_masks"), _NO_MASK),
    **dict.fromkeys(("weight", "loss_weight", "sample_weight"), _NO_SHARE),
    "parallel_tool_calls": (
        (True,),
        "no chat template has a place for it. Say it in the system's text, or leave it out",
    ),
}
_REFUSED_IN_TURNS: Refused = {
    **dict.fromkeys(_MEDIA, _NO_MEDIA),
    **dict.fromkeys(("train_detail", "training_detail"), _NO_MASK),
    "refusal": ((), "the answer is read from the text. Write it there"),
    "prefix": ((False,), "answers are trained whole. Leave the field out"),
}
# `apply_chat_template` takes these from its caller, not from a template's own variables.
_RESERVED = {"chat_template", "tools", "documents", "add_generation_prompt", "tokenize"}
_RESERVED |= {"continue_final_message", "return_dict", "return_assistant_tokens_mask", "padding"}
_RESERVED |= {"conversation", "truncation", "max_length", "return_tensors", "tokenizer_kwargs"}


def is_given(value: Any) -> bool:
    """Whether a field has anything to honour: tables fill what a record lacks, also with ""."""
    return not (value is None or (isinstance(value, str | list | dict) and not value))


def require_object(value: Any, where: str) -> None:
    """RecipeError if ``value`` is no JSON object."""
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: expected an object, found a {type(value).__name__}")


def refuse_half_characters(text: str, place: str) -> None:
    """RecipeError if a text can't be written as UTF-8, which tokenizers read."""
    # JSON may have "\ud800", a half of a pair, alone.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise RecipeError(
            f"{place} has half a character, {half!r}: mend it, or leave the record out"
        ) from error


def one_of(given: dict[str, Any], where: str, *fields: str) -> tuple[str, Any]:
    """The one of the fields that has a value, with its name; else one that is there at all.

    Raises RecipeError where two have other values: one of them would be dropped.
    """
    there = [field for field in fields if field in given] or fields
    valued = [field for field in there if given.get(field) is not None]
    for other in valued[1:]:
        if given[other] != given[valued[0]]:
            raise RecipeError(
                f'{where}: "{valued[0]}" and "{other}" mean the same and have different values: '
                "leave one out"
            )
    name = (valued or there)[0]
    return name, given.get(name)


def note_others(
    given: dict[str, Any],
    where: str,
    known: Collection[str],
    refused: Refused,
    unknown: dict[str, None],
) -> None:
    """Refuse what can't be honoured; add to ``unknown`` what no format knows."""
    for field, value in given.items():
        if field in known or not is_given(value):
            continue
        if field not in refused:
            unknown[field] = None
        elif value not in refused[field][0]:
            raise RecipeError(f'{where}: "{field}" is not honoured, as {refused[field][1]}')


def text_of(value: Any, place: str) -> str:
    """A text, or the texts of OpenAI's list of parts put together."""
    if isinstance(value, list) and value:
        value = "".join(_part(part, f"{place}, part {number}") for number, part in enumerate(value))
    if not isinstance(value, str):
        raise RecipeError(f"{place} must be a text, not a {type(value).__name__}")
    refuse_half_characters(value, place)
    return value


def _part(part: Any, place: str) -> str:
    require_object(part, place)
    others = {key for key, value in part.items() if is_given(value)} - {"type", "text"}
    if part.get("type") != "text" or others:
        named = f'"type" is {part.get("type")!r}' if not others else f'it has "{min(others)}"'
        raise RecipeError(
            f'{place}: {named}, but parts of a text have "type": "text" and "text" alone. Leave '
            "the record out, or write its content as one text"
        )
    return text_of(part.get("text"), f'{place}: "text"')


def system_of(record: dict[str, Any], where: str) -> str:
    """The system's text that stands beside the turns; "" where there is none."""
    given = {field: record[field] for field in SYSTEM if is_given(record.get(field))}
    field, value = one_of(given, where, *SYSTEM)
    return "" if value is None else text_of(value, f'{where}: field "{field}"')


def options_of(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return what chat templates take beside the turns: tools, documents and own variables."""
    given = {field: record[field] for field in OPTIONS if is_given(record.get(field))}
    found: dict[str, Any] = {}
    name, tools = one_of(given, where, "tools", "functions")
    if name in given:
        listed = _objects(tools, f'{where}: field "{name}"', "tools, each a JSON schema")
        if listed:
            found["tools"] = [_tool(tool, f'{where}: field "{name}"') for tool in listed]
    if "documents" in given:
        place = f'{where}: field "documents"'
        found["documents"] = _objects(given["documents"], place, "documents, each an object")
    variables = _from_json(given.get("chat_template_kwargs", {}), f"{where}: chat_template_kwargs")
    if not isinstance(variables, dict) or _RESERVED & variables.keys():
        raise RecipeError(
            f'{where}: field "chat_template_kwargs" must be an object of variables of the chat '
            f"template, without {', '.join(sorted(_RESERVED))}"
        )
    refuse_half_characters(json.dumps([found, variables], ensure_ascii=False), where)
    return {**found, **variables}


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """As OpenAI writes it, which templates expect: data also has the function alone."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecipeError(f'{place} has a tool without a "name": {json.dumps(tool)[:60]}')
    # A table has one type for a field, so parameters that differ are written as JSON in it.
    if isinstance(function.get("parameters"), str):
        function = {**function, "parameters": _from_json(function["parameters"], place)}
    return {"type": "function", **({} if function is tool else tool), "function": function}


def weight_of(turn: dict[str, Any], here: str, *, is_answer: bool) -> bool:
    """Whether a turn is trained, as its flags say; without one, whether it is an answer."""
    found = None
    for field in _WEIGHTS:
        value = turn.get(field)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RecipeError(
                f'{here}: "{field}" is {value!r}, but a turn is trained (1, true) or not (0, '
                "false): set one of these"
            )
        if found is not None and found != bool(value):
            raise RecipeError(f'{here}: "{field}" says otherwise than another field: leave one out')
        if value and not is_answer:
            raise RecipeError(
                f'{here}: "{field}" is {value!r}, but only turns of the assistant are trained: set '
                "it to 0, or leave it out; train_on_prompt=true trains all turns"
            )
        found = bool(value)
    return is_answer if found is None else found


def extras_of(turn: dict[str, Any], here: str, role: str) -> dict[str, Any]:
    """Return what chat templates read of a turn besides its text, under the names they read."""
    allowed = {
        "assistant": (CALLS, "function_call", "name", *THOUGHTS),
        "tool": ("name", "tool_call_id"),
    }.get(role, ("name",))
    found: dict[str, Any] = {}
    for field in (*THOUGHTS, "name", "tool_call_id", CALLS, "function_call"):
        value = turn.get(field)
        if not is_given(value):
            continue
        if field not in allowed:
            raise RecipeError(
                f'{here}: "{field}" has no place in a turn of the {role}: leave it out'
            )
        if field in (CALLS, "function_call"):
            if CALLS in found:
                raise RecipeError(f'{here}: "{CALLS}" and "{field}" at once: leave one out')
            found[CALLS] = calls_of(value, f'{here}: "{field}"')
        else:
            found[field] = text_of(value, f'{here}: "{field}"')
    return found


def note_turn(turn: dict[str, Any], here: str, texts: Collection[str], unknown: Any) -> None:
    """`note_others` for a turn, whose role and text are the fields ``texts``."""
    known = {*texts, *_WEIGHTS, *THOUGHTS, CALLS, "function_call", "name", "tool_call_id"}
    note_others(turn, here, known, _REFUSED_IN_TURNS, unknown)


def calls_of(value: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls as OpenAI writes them, with arguments as an object; also of a call alone."""
    value = _from_json(value, place)
    calls = _objects([value] if isinstance(value, dict) else value, place, "calls of tools")
    found = []
    for call in calls:
        function = call.get("function", call)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise RecipeError(f'{place} has a call without a "name": {json.dumps(call)[:60]}')
        arguments = _from_json(function.get("arguments") or {}, f"{place}, arguments of {name}")
        if not isinstance(arguments, dict):
            raise RecipeError(f"{place}: arguments of {name} must be an object")
        said = {**function, "arguments": arguments}
        found.append({"type": "function", **({} if function is call else call), "function": said})
    refuse_half_characters(json.dumps(found, ensure_ascii=False), place)
    return found


def _objects(value: Any, place: str, what: str) -> list[dict[str, Any]]:
    value = _from_json(value, place)
    if not isinstance(value, list) or not all(isinstance(element, dict) for element in value):
        raise RecipeError(f"{place} must be a list of {what}; it has {value!r:.60}")
    return value


def _from_json(value: Any, place: str) -> Any:
    """The value, or what it is as JSON where it is a text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{place} is a text, but not JSON: {error}") from error
