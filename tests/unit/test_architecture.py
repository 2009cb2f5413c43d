"""The documents point at things that exist: functions, files, headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md"]
DOCUMENTS += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))


def missing_functions(text: str, root: Path) -> list[str]:
    """Every `path:function` in backquotes whose path or function isn't there."""
    found = []
    for path, function in re.findall(r"`([\w./-]+\.\w+):(~?[\w.:]+)`", text):
        file = root / path
        name = re.split(r"\.|::", function)[-1]
        if not file.is_file():
            found.append(f"{path}:{function}: no such file")
        elif not _defines(file.read_text(), name, is_python=file.suffix in {".py", ".pyi"}):
            found.append(f"{path}:{function}: no such function")
    return found


def _defines(text: str, name: str, *, is_python: bool) -> bool:
    if is_python:
        return re.search(rf"^\s*(async )?(def|class) {re.escape(name)}\b", text, re.M) is not None
    # A definition or declaration: its name, then its parameters, a body, or members.
    return re.search(rf"(?<![\w.>])~?{re.escape(name)}\s*[({{;:]", text) is not None


def missing_links(text: str, folder: Path) -> list[str]:
    """Every relative link whose file, or whose heading in it, isn't there."""
    found = []
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = folder / path if path else None
        if file is not None and not file.exists():
            found.append(f"{target}: no such file")
        elif anchor:
            linked = file.read_text() if file is not None else text
            if anchor not in _anchors(linked):
                found.append(f"{target}: no such heading")
    return found


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    file = ROOT / document
    found = missing_links(file.read_text(), file.parent)
    assert not found, f"{document}: " + "\n".join(found)


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_functions_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    found = missing_functions(text, ROOT)
    assert not found, f"{document}: " + "\n".join(found)


def test_architecture_names_functions() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(re.findall(r"`[\w./-]+\.\w+:[\w.:~]+`", text)) >= 8, "the life of an all_reduce"


def test_missing_functions_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class C:\n    def here(self): ...\nuse(there)\n")
    (tmp_path / "a.cpp").write_text("void C::here(int x) {\n  b.there(1);\n}\nstruct D {\n};\n")
    good = "`a.py:C.here` `a.py:C` `a.cpp:here` `a.cpp:C::here` `a.cpp:D` `a.py`"
    assert not missing_functions(good, tmp_path)
    for bad in ("`a.py:there`", "`a.cpp:there`", "`b.py:here`", "`a.cpp:nowhere`"):
        assert missing_functions(bad, tmp_path), bad


def test_missing_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One thing: `x`\n")
    text = "# Here\n[a](a.md) [b](a.md#one-thing-x) [c](#here) [d](https://example.org/x)"
    assert not missing_links(text, tmp_path)
    for bad in ("[a](b.md)", "[a](a.md#two)", "[a](#nowhere)"):
        assert missing_links(bad, tmp_path), bad
