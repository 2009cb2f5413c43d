"""Checks the prose of comments, docstrings and commit messages.

    python .ci/prose.py check [--list]     comments and docstrings of the tree
    python .ci/prose.py message FILE       a commit message, as git gives it to the hook commit-msg

`make lint` runs the first, `.githooks/commit-msg` the second.

A block counts as a fragment if it begins with one of OPENERS: whoever reads it has to guess what
the sentence is about. At most MOST_FRAGMENTS of all blocks may be fragments.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    *(".ci", "csrc", "deepytorch", "deepytorch_core", "docs/examples", "integrations"),
    "recipes",
)
TESTS = ("tests",)
OPENERS = ("Of", "Who", "Whose", "What", "Which", "Where", "Behind")
MOST_FRAGMENTS = 0.005
"""This share of blocks is what projects have that are praised for how they read."""
MOST_SUBJECT = 72
_BEGINS = re.compile(rf"({'|'.join(OPENERS)})\b")
_NATIVE = (".cpp", ".hpp", ".cu", ".cuh", ".h")
_COMMENT = re.compile(r"(?:^|\s)//[/!<]*\s?(.*)")

Block = tuple[int, str]
"""A line number, from 1, and the text that begins there."""


def in_python(source: str) -> Iterator[Block]:
    """Yield comments, neighbouring lines as one, and docstrings."""
    lines = source.splitlines()
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        is_alone = lines[line - 1].lstrip().startswith("#")
        if not (is_alone and last == line - 1):
            yield line, token.string.lstrip("#").strip()
        last = line if is_alone else -1
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value.strip()


def in_native(source: str) -> Iterator[Block]:
    """Yield comments of C++ and CUDA, neighbouring lines as one."""
    last = -1
    for line, text in enumerate(source.splitlines(), 1):
        found = _COMMENT.search(text)
        if found is None:
            continue
        is_alone = text.lstrip().startswith("//")
        if not (is_alone and last == line - 1):
            yield line, found.group(1).strip()
        last = line if is_alone else -1


def blocks(folders: tuple[str, ...], root: Path = ROOT) -> Iterator[tuple[Path, int, str]]:
    """Yield the file, the line and the text of each block."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix == ".py":
                found = in_python(path.read_text(encoding="utf-8"))
            elif path.suffix in _NATIVE:
                found = in_native(path.read_text(encoding="utf-8"))
            else:
                continue
            yield from ((path, line, text) for line, text in found)


def is_fragment(text: str) -> bool:
    """Tell whether a block begins as no sentence does that reads at first sight."""
    return _BEGINS.match(text) is not None


def problem_of(message: str) -> str | None:
    """Return why a commit message can't stay as it is, or None."""
    subject = next((line for line in message.splitlines() if not line.startswith("#")), "").strip()
    if not subject:
        return "the subject is empty"
    if len(subject) > MOST_SUBJECT:
        return f"the subject has {len(subject)} characters: {MOST_SUBJECT} at most"
    if is_fragment(subject):
        return f"the subject begins with {subject.split()[0]}: begin with what the commit does"
    return None


def check(*, is_listed: bool) -> int:
    """Print how many fragments there are, and fail where they are too many."""
    status = 0
    for what, folders in (("sources", FOLDERS), ("tests", TESTS)):
        found = list(blocks(folders))
        fragments = [(path, line, text) for path, line, text in found if is_fragment(text)]
        share = len(fragments) / max(1, len(found))
        print(f"{what}: {len(fragments)} of {len(found)} comments are fragments ({share:.2%})")
        if share > MOST_FRAGMENTS:
            print(f"begin them with a subject and a verb: {MOST_FRAGMENTS:.1%} are allowed")
            status = 1
        if share > MOST_FRAGMENTS or is_listed:
            for path, line, text in fragments:
                print(f"  {path.relative_to(ROOT)}:{line}: {text.splitlines()[0][:80]}")
    return status


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parsers = parser.add_subparsers(dest="command", required=True)
    parsers.add_parser("check").add_argument("--list", action="store_true")
    parsers.add_parser("message").add_argument("file", type=Path)
    asked = parser.parse_args(arguments)
    if asked.command == "check":
        return check(is_listed=asked.list)
    problem = problem_of(asked.file.read_text(encoding="utf-8"))
    if problem is not None:
        print(f"commit message: {problem}", file=sys.stderr)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
