# SPDX-License-Identifier: Apache-2.0
"""The records of a data set, each with the place it has there.

JSON is read here, as an error must name its line, and a field may have other types in other
records. All else is read by `datasets`, which keeps what it has read. One rank of a node reads it,
and the others, and later runs, take that.
"""

import csv
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.paths import is_local, refuse_missing, refuse_unknown_data

Records = list[tuple[str, Any]]

_LINES_WAY_OUT = "(one record a line is read from a file that ends in .jsonl)"
_JSON = (".json", ".jsonl")
_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".arrow": "arrow"}
_DELIMITER = {".csv": ",", ".tsv": "\t"}
_FIRST = 20  # records that are looked at before any process starts,
_FIRST_BYTES = 64 << 20  # in files that are to be read as a whole for it


def read_records(data: str) -> Records:
    """(place, record) of each record, at least one, of a file, a folder or a data set of the hub.

    Raises RecipeError naming the file, and where there is one the line that is wrong.
    """
    path = Path(data)
    records: Records
    if path.suffix.lower() in _JSON and not path.is_dir():
        refuse_missing("data", path)
        records = [(f"{path}, {place}", record) for place, record in _json(path)]
    else:
        named = "row" if path.suffix.lower() != ".txt" else "line"
        rows = _table(data)
        records = [(f"{data}, {named} {index}", _without_nulls(row)) for index, row in rows]
    if not records:
        raise RecipeError(f"{data} holds no records")
    return records


def first_records(data: str) -> Records:
    """The first few of `read_records`, without reading more; none where that takes long.

    Raises RecipeError as it does.
    """
    path = Path(data)
    suffix = path.suffix.lower()
    if not is_local(data):
        refuse_unknown_data(data)
        return []
    refuse_missing("data", path)
    if path.is_dir():
        _builder_of(path)
        return []
    if suffix not in _JSON and suffix not in _BUILDERS:
        raise RecipeError(_no_kind(path))
    if path.stat().st_size == 0:
        raise RecipeError(f"{path} holds no records")
    if suffix == ".jsonl":
        with _opened(path) as file:
            text = "".join(itertools.islice(file, _FIRST))
        return [(f"{path}, {place}", record) for place, record in _lines(text, path)]
    if suffix in _JSON:
        return read_records(data)[:_FIRST] if path.stat().st_size < _FIRST_BYTES else []
    if _BUILDERS[suffix] == "csv":
        with _opened(path) as file:
            rows = list(
                itertools.islice(csv.DictReader(file, delimiter=_DELIMITER[suffix]), _FIRST)
            )
        return [(f"{path}, row {number}", row) for number, row in enumerate(rows)]
    return []


def _opened(path: Path) -> Any:
    try:
        path.open("rb").close()
        return path.open(encoding="utf-8-sig", newline="\n", errors="strict")
    except OSError as error:
        raise RecipeError(f"cannot read data={path}: {error}") from error


def _no_kind(path: Path) -> str:
    return (
        f"data={path} must end in .json (a list of records), .jsonl (one record a line), .csv, "
        ".tsv, .parquet, .arrow or .txt (one text a line), or be a folder of such files"
    )


def _json(path: Path) -> list[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read data={path}: {error}") from error
    return list(_lines(text, path) if path.suffix.lower() == ".jsonl" else _list(text, path))


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


def _table(data: str) -> Iterator[tuple[int, Any]]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise RecipeError(f"reading {data} needs datasets: pip install datasets") from None
    try:
        yield from enumerate(_loaded(datasets, data))
    except RecipeError:
        raise
    except Exception as error:  # of pyarrow, pandas, the hub, or a data set's own
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise RecipeError(f"cannot read data={data}: {reason}") from error


def _loaded(datasets: Any, data: str) -> Any:
    """The rows of a table, a folder, or the hub's ``name`` or ``name:subset``."""
    import torch.distributed as dist

    path = Path(data)
    if not sys.stderr.isatty() or dist.get_node_local_rank(fallback_rank=0) > 0:
        datasets.disable_progress_bars()
    if not is_local(data):
        name, _, subset = data.partition(":")
        return datasets.load_dataset(name, subset or None, split="train")
    refuse_missing("data", path)
    if (path / "state.json").is_file():  # as Dataset.save_to_disk writes it
        return datasets.load_from_disk(data)
    files, builder = _builder_of(path)
    options: dict[str, Any] = {}
    if builder == "csv":
        options = _as_written(datasets, files[0])
    return datasets.load_dataset(
        builder, data_files=list(map(str, files)), split="train", **options
    )


def _builder_of(path: Path) -> tuple[list[Path], str]:
    """The data files at a path, and what reads them in `datasets`; RecipeError for other ones."""
    kinds = {**_BUILDERS, **dict.fromkeys(_JSON, "json")}
    if path.is_file():
        suffix = path.suffix.lower()
        if suffix not in kinds:
            raise RecipeError(_no_kind(path))
        return [path], kinds[suffix]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in kinds)
    if not files:
        raise RecipeError(f"data={path} has no data files. {_no_kind(path)}")
    found = {kinds[file.suffix.lower()] for file in files}
    if len(found) > 1:
        raise RecipeError(
            f"data={path} has files of several kinds ({', '.join(sorted(found))}): keep one kind"
        )
    return files, found.pop()


def _as_written(datasets: Any, path: Path) -> dict[str, Any]:
    """Options by which a table's fields stay the texts that they are: 007, NA."""
    delimiter = _DELIMITER[path.suffix.lower()]
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = next(csv.reader(file, delimiter=delimiter), [])
    texts = datasets.Features({name: datasets.Value("string") for name in header})
    return {"sep": delimiter, "features": texts, "keep_default_na": False}


def _without_nulls(value: Any) -> Any:
    # Rows of a table all have the same fields: what one lacks is null, at any depth.
    if isinstance(value, dict):
        return {key: _without_nulls(field) for key, field in value.items() if field is not None}
    return [_without_nulls(element) for element in value] if isinstance(value, list) else value
