"""docs/messages.md has every line that a user can meet, as the source says it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/messages.md"

# Lines that deepytorch prints, and errors that speak to a user. What a benchmark refuses names the
# option to change, and a wrong argument in a program of one's own is a plain ValueError.
SPEAKERS = {"say", "say_first", "say_once", "warn", "NotImplementedError", "RuntimeError"}
SPEAKERS |= {"AdapterError", "CompareError", "HorovodInternalError", "IntegrationError"}
SPEAKERS |= {"RecipeError", "RankRecipeError", "TuneError"}
FOLDERS = ("deepytorch", "deepytorch_core", "integrations", "recipes")
# Those of doctor are on a page of its own, docs/doctor.md.
APART = ("deepytorch_core/testing/", "deepytorch_core/bench/", "deepytorch_core/doctor/")
APART = (*APART, "deepytorch/workloads/")

VARYING = "…"
LEAST_FIXED = 8  # letters in a row without which a message says nothing of its own


@cache
def fixed_parts(message: str) -> tuple[str, ...]:
    """Return the parts of a message that never vary, in order, without surrounding blanks."""
    return tuple(" ".join(part.split()) for part in message.split(VARYING) if part.strip())


def fits(row: str, message: str) -> bool:
    """Whether all fixed parts of a row come in the message, in their order."""
    place = 0
    for part in fixed_parts(row):
        found = message.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


def is_told(row: str, message: str) -> bool:
    """Whether the row is about this message: it fits, and is no mere turn of phrase in it."""
    told, whole = ("".join(fixed_parts(text)) for text in (row, message))
    return fits(row, message) and len(told) >= min(20, 0.7 * len(whole))


def text_of(node: ast.expr | None) -> str:
    """A string in the source, with `…` where it is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return VARYING


@cache
def python_files() -> tuple[tuple[str, ast.Module], ...]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple((path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in paths)


def spoken() -> Iterator[tuple[str, str]]:
    """(place, message) of every call of a speaker whose message has words of its own."""
    for name, tree in python_files():
        if name.startswith(APART):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            speaker = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            speaker = speaker.id if isinstance(speaker, ast.Name) else speaker
            message = " ".join(text_of(node.args[0]).split())
            if speaker in SPEAKERS and re.search(rf"[\w ]{{{LEAST_FIXED}}}", message):
                yield f"{name}:{node.lineno}", message


def python_texts() -> set[str]:
    """Every string of the Python sources, also those of helpers that make a message."""
    texts = {
        " ".join(text_of(node).split())
        for _, tree in python_files()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
    }
    return {text for text in texts if len(text) >= LEAST_FIXED}


def native_texts() -> str:
    """The C++ sources with neighbouring literals as one and what is put between them as `…`."""
    paths = sorted([*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.hpp")])
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    source = re.sub(r'(?<!\\)"\s*\n\s*"', "", source)
    return " ".join(source.replace('\\"', '"').split())


def rows() -> list[str]:
    """The first cell of every row of the page's tables: the message."""
    text = PAGE.read_text(encoding="utf-8")
    return [row.strip("`") for row in re.findall(r"^\| (`.*?`) \| ", text, re.M)]


def test_no_message_is_missing() -> None:
    documented = rows()
    missing = [
        f"{place}: {message}"
        for place, message in spoken()
        if not any(is_told(row, message) for row in documented)
    ]
    assert not missing, "not in docs/messages.md (or changed):\n" + "\n".join(missing)


def test_no_message_is_unknown() -> None:
    python, native = python_texts(), native_texts()
    unknown = [
        row
        for row in rows()
        if not any(fits(row, text) for text in python)
        and not all(part in native for part in fixed_parts(row))
    ]
    assert not unknown, "no source says:\n" + "\n".join(unknown)


def test_rows_say_something() -> None:
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    assert len(rows()) == len(table)
    assert len(set(rows())) == len(table), "a message is there twice"
    empty = [row for row in rows() if len("".join(fixed_parts(row))) < LEAST_FIXED]
    assert not empty, empty
