# SPDX-License-Identifier: Apache-2.0
"""The text of `deepytorch train RECIPE --help`: each key with type, default and meaning.

Types and defaults are those of the options' dataclass, meanings the comments of the recipe's YAML.
"""

import dataclasses
import re
import typing
from dataclasses import dataclass
from pathlib import Path

from deepytorch.recipes.base.config import kind_of
from deepytorch.recipes.base.options import RunOptions

_SECTION = re.compile(r"# --- (.*) ---")
_KEY = re.compile(r"(\w+):[^#]*(?:#\s*(.*))?")


@dataclass(frozen=True)
class Key:
    """One option: its name, its type and default in words, and what it means."""

    name: str
    kind: str
    default: str
    meaning: str


def sections(options: type[RunOptions], config: Path) -> list[tuple[str, list[Key]]]:
    """The keys in the order of the file ``config``, below the titles that it has."""
    hints = typing.get_type_hints(options)
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    found: list[tuple[str, list[Key]]] = []
    for title, name, meaning in _commented(config.read_text(encoding="utf-8")):
        if not found or found[-1][0] != title:
            found.append((title, []))
        kind = kind_of(hints[name])
        # The comment begins with the choices, which are said already.
        meaning = meaning.removeprefix(kind.removesuffix(" | null")).lstrip(" :,")
        found[-1][1].append(Key(name, kind, _shown(defaults[name]), meaning))
    return found


def _commented(text: str) -> list[tuple[str, str, str]]:
    """(section, key, comment) of each key; a comment goes on in lines that have nothing else."""
    title, found = "", list[tuple[str, str, str]]()
    for line in text.splitlines():
        if section := _SECTION.fullmatch(line):
            title = section[1]
        elif key := _KEY.fullmatch(line):
            found.append((title, key[1], key[2] or ""))
        elif found and line.startswith(" ") and line.strip().startswith("#"):
            *_, last = found
            found[-1] = (*last[:2], f"{last[2]} {line.strip().removeprefix('#').strip()}")
    return found


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
