"""Checks the prose of comments, docstrings and commit messages.

    python .ci/prose.py check [--list]     comments and docstrings of the tree
    python .ci/prose.py message FILE       a commit message, as git gives it to the hook commit-msg

`make lint` runs the first, `.githooks/commit-msg` the second.

A block counts as a fragment if it begins with one of OPENERS: whoever reads it has to guess what
the sentence is about. At most MOST_FRAGMENTS of all blocks may be fragments. A sentence of more
than MOST_WORDS words is long: readers lose its beginning before they come to its end. At most
MOST_LONG of all sentences may be long.
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
MOST_WORDS = 25
MOST_LONG = 0.005
MOST_SUBJECT = 72
_BEGINS = re.compile(rf"({'|'.join(OPENERS)})\b")
_NATIVE = (".cpp", ".hpp", ".cu", ".cuh", ".h")
_CODE = re.compile(r"``?[^`]+``?")
_WORD = re.compile(r"[^\W_][\w'’%/.,-]*")
# A paragraph ends at an empty line; an item of a list, an argument or a heading begins another.
_PARAGRAPH = re.compile(
    r"\n\s*\n|:\s*\n(?=\s)"
    r"|\n\s*(?=[-*•] |\d+\. |[\w`*, /.-]{1,60}: |@\w+|NOTE \[)"
)
_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(`\[]?[A-Z0-9`_])|;\s")
_LAID_OUT = (" | ", ">>> ", " = ", "::", "->")
_COMMENT = re.compile(r"(?:^|\s)//[/!<]*\s?(.*)")

Block = tuple[int, str]
"""A line number, from 1, and the text that begins there."""


def joined(comments: Iterator[tuple[int, str, bool]]) -> Iterator[Block]:
    """Yield comments, those on neighbouring lines of their own as one.

    Args:
        comments: line numbers, texts, and whether nothing else stands on the line; in order.
    """
    begins, lines, last = 0, list[str](), -1
    for line, text, is_alone in comments:
        if lines and not (is_alone and last == line - 1):
            yield begins, "\n".join(lines).strip()
            lines = []
        if not lines:
            begins = line
        lines.append(text)
        last = line if is_alone else -1
    if lines:
        yield begins, "\n".join(lines).strip()


def in_python(source: str) -> Iterator[Block]:
    """Yield comments and docstrings."""
    lines = source.splitlines()
    yield from joined(
        (token.start[0], token.string.lstrip("#"), lines[token.start[0] - 1].lstrip()[0] == "#")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value.strip()


def in_native(source: str) -> Iterator[Block]:
    """Yield comments that begin with two slashes."""
    found = (
        (line, _COMMENT.search(text), text.lstrip().startswith("//"))
        for line, text in enumerate(source.splitlines(), start=1)
    )
    yield from joined((line, match.group(1), is_alone) for line, match, is_alone in found if match)


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


def sentences(text: str) -> Iterator[str]:
    """Yield a block's sentences, without what is laid out as code or as a table."""
    for paragraph in _PARAGRAPH.split(text):
        if not any(mark in paragraph for mark in _LAID_OUT):
            yield from _SENTENCE.split(" ".join(paragraph.split()))


def is_long(sentence: str) -> bool:
    """Tell whether it has more than MOST_WORDS words; a name in backticks is one."""
    return len(_WORD.findall(_CODE.sub("code", sentence))) > MOST_WORDS


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
    """Print how many fragments and long sentences there are, and fail where they are too many."""
    status = 0
    for what, folders in (("sources", FOLDERS), ("tests", TESTS)):
        found = list(blocks(folders))
        fragments = [block for block in found if is_fragment(block[2])]
        said = [(path, line, text) for path, line, block in found for text in sentences(block)]
        long = [sentence for sentence in said if is_long(sentence[2])]
        share = len(fragments) / max(1, len(found))
        of_long = len(long) / max(1, len(said))
        print(f"{what}: {len(fragments)} of {len(found)} comments are fragments ({share:.2%})")
        print(f"{what}: {len(long)} of {len(said)} sentences are long ({of_long:.2%})")
        if share > MOST_FRAGMENTS:
            print(f"begin them with a subject and a verb: {MOST_FRAGMENTS:.1%} are allowed")
        if of_long > MOST_LONG:
            print(f"part those of more than {MOST_WORDS} words: {MOST_LONG:.1%} are allowed")
        is_bad = share > MOST_FRAGMENTS or of_long > MOST_LONG
        status = max(status, int(is_bad))
        if is_bad or is_listed:
            for path, line, text in [*fragments, *long]:
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
