"""A page of the documentation as a program: its files are written, its commands run in order.

A fenced block of a page is one of

* a file: ```` ```python title="train.py" ```` (any language) is written into the folder;
* commands: ```` ```bash ```` is run there, unless a line `<!-- not run: REASON -->` stands before;
* what the commands above it print: ```` ```text title="Output" ````. Each line must come in the
  output, in this order; in a line `...` stands for anything, and a line of `...` for any lines;
* anything else is looked at by `parse` only: bash, Python, JSON and YAML must be well formed.
"""

from __future__ import annotations

# ruff: noqa: TID251
import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

DOCS = Path(__file__).resolve().parents[2] / "docs"
OUTPUT = "Output"
_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n\s*)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str
    reason: str  # why it is not run; "" where it is
    line: int


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    page = path.read_text(encoding="utf-8")
    for found in _FENCE.finditer(page):
        title = _TITLE.search(found["info"])
        yield Block(
            language=found["language"],
            title=title[1] if title else "",
            text=textwrap.dedent(found["text"]),
            reason=found["reason"] or "",
            line=page[: found.start("language")].count("\n") + 1,
        )


def parse(block: Block) -> None:
    """Raise an error unless the block is well formed in its language."""
    if block.language == "bash":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    elif block.language == "python":
        ast.parse(block.text)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        list(yaml.safe_load_all(block.text))


def run(path: Path, folder: Path, *, timeout_s: float = 300) -> int:
    """Do in `folder` what the page at `path` says; returns the number of commands' blocks run.

    Raises AssertionError, naming the page's line, when a command fails or prints something else.
    """
    num_run, printed = 0, ""
    for block in blocks(path):
        place = f"{path.name}:{block.line}"
        if block.title == OUTPUT:
            expect(block.text, printed, place)
        elif block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "bash" and not block.reason:
            printed = execute(block.text, folder, place, timeout_s)
            num_run += 1
    return num_run


def execute(commands: str, folder: Path, place: str, timeout_s: float) -> str:
    """Run the commands and return what they print on both streams."""
    # The interpreter's own folder has the commands that the page names.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment(folder) | {"PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{place}: status {done.returncode}\n{done.stdout}"
    return done.stdout


def environment(folder: Path) -> dict[str, str]:
    """A user's: nothing of deepytorch's set but where the compiled adapter is kept.

    What is measured is kept in the folder.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DEEPYTORCH_") or name == "DEEPYTORCH_CACHE_DIR"
    }
    profile = str(folder / "profile.json")
    return kept | {"DEEPYTORCH_PROFILE": profile, "NO_COLOR": "1", "COLUMNS": "120"}


def expect(lines: str, printed: str, place: str) -> None:
    """The lines come in what was printed, in their order; between them there may be others."""
    rest = [line.rstrip() for line in printed.splitlines()]
    for line in (line.rstrip() for line in lines.splitlines()):
        if line.strip() in ("", "..."):
            continue
        pattern = ".*".join(re.escape(part) for part in line.split("..."))
        for number, candidate in enumerate(rest):
            if re.fullmatch(pattern, candidate):
                rest = rest[number + 1 :]
                break
        else:
            raise AssertionError(f"{place}: no line like {line!r} (from there on) in\n{printed}")
