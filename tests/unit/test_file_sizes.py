"""No file grows past what one reads in a sitting, no call past what one can read at a glance."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 600
MAX_POSITIONAL = 5
SOURCE_SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".h", ".cu", ".cuh"}
PACKAGES = ["deepytorch", "deepytorch_core", "integrations", "recipes"]
FOLDERS = [*PACKAGES, "csrc", "tests"]


def too_long(name: str, text: str) -> list[str]:
    num_lines = text.count("\n")
    return [f"{name}: {num_lines} lines, limit {MAX_LINES}"] if num_lines > MAX_LINES else []


def too_many_positional(name: str, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text, name)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        # A GPU kernel has no keyword-only arguments.
        if any(
            ast.unparse(decorator) == "triton.jit"
            for decorator in getattr(node, "decorator_list", [])
        ):
            continue
        arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        if arguments and arguments[0] in {"self", "cls"}:
            del arguments[0]
        if len(arguments) > MAX_POSITIONAL:
            label = getattr(node, "name", "lambda")
            found.append(
                f"{name}:{node.lineno}: {label} takes {len(arguments)} positional arguments, "
                f"limit {MAX_POSITIONAL}: make the rest keyword-only"
            )
    return found


def _sources(folders: list[str], suffixes: set[str]) -> dict[str, str]:
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*"))]
    return {
        file.relative_to(ROOT).as_posix(): file.read_text()
        for file in files
        if file.suffix in suffixes
    }


def test_no_file_is_too_long() -> None:
    sources = _sources(FOLDERS, SOURCE_SUFFIXES)
    assert sources
    found = [line for name, text in sources.items() for line in too_long(name, text)]
    assert not found, "\n".join(found)


def test_no_function_takes_too_many_positional_arguments() -> None:
    sources = _sources(PACKAGES, {".py"})
    found = [line for name, text in sources.items() for line in too_many_positional(name, text)]
    assert not found, "\n".join(found)


def test_a_long_file_is_found() -> None:
    assert too_long("a.py", "x = 1\n" * (MAX_LINES + 1))
    assert not too_long("a.py", "x = 1\n" * MAX_LINES)


@pytest.mark.parametrize(
    ("signature", "is_bad"),
    [
        ("def f(a, b, c, d, e, f): ...", True),
        ("def f(a, b, /, c, d, e, f): ...", True),
        ("f = lambda a, b, c, d, e, f: 0", True),
        ("class C:\n    async def f(self, a, b, c, d, e, f): ...", True),
        ("class C:\n    def f(self, a, b, c, d, e): ...", False),
        ("def f(a, b, c, d, e, *, f, g): ...", False),
        ("def f(*args, **kwargs): ...", False),
        ("@triton.jit\ndef f(a, b, c, d, e, f): ...", False),
    ],
)
def test_positional_arguments_are_counted(signature: str, is_bad: bool) -> None:
    assert bool(too_many_positional("a.py", signature)) == is_bad
