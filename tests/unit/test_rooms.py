"""The house has few rooms, and imports lead down: counted over every import, wherever it stands.

A room is a package or module right below `deepytorch_core`. An arrow is an import of one room by
another. A floor lies above all that its rooms import. Imports in functions and those for type
checkers count like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FOLDERS = {
    "deepytorch_core": "deepytorch_core",
    "deepytorch": "deepytorch",
    "integrations": "deepytorch.integrations",
    "recipes": "deepytorch.recipes",
}
CORE = "deepytorch_core"
MOST_ROOMS = 20
MOST_FLOORS = 8
MOST_ARROWS = 50

Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class House:
    """The imports of some modules by each other, by the importing module's installed name."""

    imports: dict[str, set[str]]

    @classmethod
    def read(cls, root: Path) -> House:
        files = {}
        for folder, package in FOLDERS.items():
            for path in sorted((root / folder).rglob("*.py")):
                parts = path.relative_to(root / folder).with_suffix("").parts
                files[".".join([package, *parts]).removesuffix(".__init__")] = path
        assert files
        return cls.of({name: (path.read_text(), path.stem) for name, path in files.items()})

    @classmethod
    def of(cls, texts: Mapping[str, tuple[str, str]]) -> House:
        """Make it of (text, stem of the file's name) by module."""
        imports = {}
        for name, (text, stem) in texts.items():
            found = _imported(ast.parse(text), name, set(texts), is_package=stem == "__init__")
            imports[name] = found - {name}
        return cls(imports)

    def rooms(self, package: str) -> dict[str, set[str]]:
        """The rooms right below `package`, and those that each imports."""
        depth = package.count(".") + 1
        below: dict[str, set[str]] = {}
        for name, others in self.imports.items():
            room = _room(name, package, depth)
            if room:
                found = {_room(other, package, depth) for other in others}
                below.setdefault(room, set()).update(found - {"", room})
        return below


def _room(name: str, package: str, depth: int) -> str:
    return name.split(".")[depth] if name.startswith(f"{package}.") else ""


def _imported(tree: ast.Module, module: str, known: set[str], *, is_package: bool) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                depth = node.level - 1 if is_package else node.level
                base = ".".join([*parts[: len(parts) - depth], *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in known else base)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in {"import_module", "__import__"}:
                found.add(str(node.args[0].value))
    return found & known


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other, in order; Tarjan's strongly connected components."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            begin = stack.index(node)
            if len(stack) - begin > 1:
                found.append(sorted(stack[begin:]))
            del stack[begin:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return sorted(found)


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each node of a graph without circles; 1 is the ground."""
    known: dict[str, int] = {}

    def floor(node: str) -> int:
        if node not in known:
            known[node] = 1 + max(map(floor, graph.get(node, ())), default=0)
        return known[node]

    return {node: floor(node) for node in sorted(graph)}


def num_arrows(graph: Graph) -> int:
    return sum(map(len, graph.values()))


def _lines(found: Iterable[object]) -> str:
    return "\n".join(map(str, found))


@pytest.fixture(scope="module")
def house() -> House:
    return House.read(ROOT)


def test_no_modules_import_each_other_in_a_circle(house: House) -> None:
    found = circles(house.imports)
    assert not found, _lines(found)


@pytest.mark.parametrize("package", FOLDERS.values())
def test_no_rooms_import_each_other_in_a_circle(house: House, package: str) -> None:
    found = circles(house.rooms(package))
    assert not found, _lines(found)


def test_the_core_has_few_rooms_floors_and_arrows(house: House) -> None:
    rooms = house.rooms(CORE)
    assert len(rooms) <= MOST_ROOMS, _lines(rooms)
    assert max(floors(rooms).values()) <= MOST_FLOORS, _lines(floors(rooms).items())
    assert num_arrows(rooms) <= MOST_ARROWS, _lines(rooms.items())


def _house(**texts: str) -> House:
    """Make a house of `deepytorch_core`: by room, with "_" for what is below it."""
    named = {f"{CORE}.{name.replace('_', '.')}": (text, name) for name, text in texts.items()}
    return House.of(named)


@pytest.mark.parametrize(
    "text",
    [
        f"import {CORE}.high",
        f"from {CORE} import high",
        "from . import high",
        f"def f():\n    from {CORE}.high import name",
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {CORE}.high import Name",
        f"import importlib\nimportlib.import_module('{CORE}.high')",
    ],
)
def test_every_kind_of_import_counts(text: str) -> None:
    house = _house(low=text, high=f"from {CORE}.low import name")
    assert circles(house.imports) == [[f"{CORE}.high", f"{CORE}.low"]]
    assert circles(house.rooms(CORE)) == [["high", "low"]]


def test_a_circle_of_rooms_needs_no_circle_of_modules() -> None:
    house = _house(
        one_a=f"from {CORE}.two import b", two_b="", one_c="", two_d=f"import {CORE}.one.c"
    )
    assert not circles(house.imports)
    assert circles(house.rooms(CORE)) == [["one", "two"]]


def test_rooms_floors_and_arrows_are_counted() -> None:
    house = _house(
        ground="import os",
        middle_a=f"from {CORE} import ground",
        middle_b=f"from {CORE}.middle import a\nfrom {CORE}.ground import name",
        top=f"import {CORE}.middle.b, {CORE}.ground",
    )
    rooms = house.rooms(CORE)
    assert rooms == {"ground": set(), "middle": {"ground"}, "top": {"middle", "ground"}}
    assert floors(rooms) == {"ground": 1, "middle": 2, "top": 3}
    assert num_arrows(rooms) == 3
    assert not circles(rooms)
