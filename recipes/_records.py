# SPDX-License-Identifier: Apache-2.0
"""The records of a data file: .json, .jsonl or .parquet, each with the place it has there."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from deepytorch.recipes._config import RecipeError

_LINES_WAY_OUT = "(one record a line is read from a file that ends in .jsonl)"


def read_records(path: Path) -> list[tuple[str, Any]]:
    """(file and place in it, record) of each record; at least one.

    Raises RecipeError naming the file, and where there is one the line that is wrong.
    """
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
    return [(f"{path}, {place}", record) for place, record in records]


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
    return [(f"row {index}", _without_nulls(row)) for index, row in enumerate(rows)]


def _without_nulls(value: Any) -> Any:
    # Rows of a table all have the same fields: what one lacks is null, at any depth.
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
