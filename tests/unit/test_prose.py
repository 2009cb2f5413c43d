"""The checker of prose finds fragments, long sentences and commit subjects that are too long."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / ".ci" / "prose.py"


@pytest.fixture(scope="module")
def prose() -> Any:
    loader = SourceFileLoader("prose", str(FILE))
    spec = spec_from_loader("prose", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


PYTHON = '''"""What a module is for."""

# Of this one line
# the second is no block of its own.
x = 1  # Where it is beside code
y = "# What is text, is none"


def f():
    """Return nothing.

    Which paragraph is first, counts alone.
    """
'''
NATIVE = """// Behind this line
// comes another.
int x;  // Who reads it
const char* y = "http://What";
/// Holds a number.
"""


def test_blocks_are_found_where_they_begin(prose: Any) -> None:
    found = list(prose.in_python(PYTHON))
    assert [line for line, text in found if prose.is_fragment(text)] == [3, 5, 1]
    assert len(found) == 4
    native = list(prose.in_native(NATIVE))
    assert [line for line, text in native if prose.is_fragment(text)] == [1, 3]
    assert [line for line, _ in native] == [1, 3, 5]


LONG = "One" + " word" * 25
SAID = f"""Say {"so " * 24}.

Args:
    first: {"word " * 20}
    second: `a name of {LONG}` counts once. {LONG}.
"""


def test_long_sentences_are_found(prose: Any) -> None:
    assert [text for text in prose.sentences(SAID) if prose.is_long(text)] == [f"{LONG}."]
    assert not prose.is_long("word " * 25)
    assert list(prose.sentences("It ends. Then `x` comes; and more")) == [
        *("It ends.", "Then `x` comes", "and more"),
    ]
    block = "\n".join(f"// {'word ' * 9}" for _ in range(3))
    assert [prose.is_long(text) for _, text in prose.in_native(block)] == [True]
    assert [prose.is_long(text) for _, text in prose.in_python(block.replace("//", "#"))] == [True]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Lend gradients instead of copying them\n\nWhat follows is free.\n", None),
        ("# a comment of git's\nMend it\n", None),
        ("x" * 73, "73 characters"),
        ("What was wrong", "begins with What"),
        ("\n# nothing\n", "empty"),
    ],
)
def test_messages(prose: Any, message: str, problem: str | None) -> None:
    found = prose.problem_of(message)
    assert (found is None) == (problem is None)
    assert problem is None or problem in found


def test_too_many_fragments_fail(
    prose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.hpp").write_text("// Of nothing\n", encoding="utf-8")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose.blocks, "__defaults__", (tmp_path,))
    assert prose.main(["check"]) == 1
    assert "csrc/a.hpp:1: Of nothing" in capsys.readouterr().out
    (tmp_path / "csrc" / "a.hpp").write_text("// Holds nothing\n", encoding="utf-8")
    assert prose.main(["check"]) == 0
