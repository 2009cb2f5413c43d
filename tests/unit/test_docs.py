"""The documentation fits the code: options, variables, examples' syntax, drawings, cards."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from deepytorch_core.base.config import VARIABLES, Options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))


def load_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page", ROOT / "tests/docs/page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["page"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


page = load_page()


def table_rows(text: str, header: str) -> dict[str, list[str]]:
    """The cells of the rows below each line that begins with `header`, by their first cell."""
    rows: dict[str, list[str]] = {}
    for _, body in re.findall(rf"^(\| {header} \|.*\n\|[-| :]+\|\n)((?:\|.*\n)+)", text, re.M):
        for line in body.splitlines():
            name, *cells = (cell.strip().strip("`") for cell in line.strip("| ").split(" | "))
            assert name not in rows, f"{name} is there twice"
            rows[name] = cells
    return rows


def test_every_option_is_documented() -> None:
    rows = table_rows((DOCS / "options.md").read_text(encoding="utf-8"), "option")
    assert tuple(rows) == Options.names()
    for name, (_, default, meaning) in rows.items():
        value = getattr(Options(), name)
        said = f"{value:g}" if isinstance(value, float) else str(value).lower()
        assert default == said, name
        assert meaning, name


def test_every_value_of_an_option_is_documented() -> None:
    rows = table_rows((DOCS / "options.md").read_text(encoding="utf-8"), "option")
    for name, (values, _, _) in rows.items():
        with pytest.raises(ValueError, match=name) as caught:
            Options.from_mapping({name: [""]})
        valid = re.search(r"expected one of (.*)", str(caught.value))
        if valid and name not in ("enabled", "debug", "deterministic"):
            assert values == valid[1], name


def test_every_variable_is_documented() -> None:
    rows = table_rows((DOCS / "options.md").read_text(encoding="utf-8"), "variable")
    assert sorted(rows) == sorted(VARIABLES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_code_is_well_formed(path: Path) -> None:
    for block in page.blocks(path):
        try:
            page.parse(block)
        except Exception as error:
            raise AssertionError(f"{path}:{block.line}: {error}") from error


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    """`make docs` also checks the places within pages."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_a_page_is_read_as_its_author_means(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        'Text\n\n```bash title="hello.sh"\necho "hello  $1"\n```\n\n'
        "<!-- not run: would fail -->\n```bash\nfalse\n```\n\n"
        "```bash\nbash hello.sh you\necho in between; echo end\n```\n\n"
        '```text title="Output"\nhello ...\n...\nend\n```\n'
    )
    assert page.run(path, tmp_path) == 1
    path.write_text('```bash\necho one\n```\n\n```text title="Output"\ntwo\n```\n')
    with pytest.raises(AssertionError, match=r"page.md:5: no line like 'two'"):
        page.run(path, tmp_path)
    path.write_text("```bash\nfalse\necho after\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:1: status 1"):
        page.run(path, tmp_path)


def test_cards_lead_to_pages() -> None:
    targets = re.findall(r'<a href="([^"]+)\.html"', (DOCS / "index.md").read_text())
    assert len(targets) == len([path for path in PAGES if path.parent.name == "quickstart"]) - 1
    for target in targets:
        assert (DOCS / f"{target}.md").exists(), target


def test_the_site_needs_neither_torch_nor_the_native_core() -> None:
    """Its charts are drawn, and the packages laid out, where both can't be imported."""
    program = (
        "import sys; sys.modules |= {'torch': None, 'deepytorch_core._core': None}\n"
        "sys.path.insert(0, 'docs/_site'); import hooks\n"
        "home = open('docs/index.md', encoding='utf-8').read()\n"
        "print(hooks.on_page_markdown(home).count('class=\"chart\"'), home.count('<!-- chart:'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    drawn, wanted = done.stdout.split()
    assert drawn == wanted != "0"


def test_the_readme_fits_and_keeps_its_order() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 180
    assert re.findall(r"^## (.*)$", text, re.M) == [
        *("Install", "60 seconds", "What switches on what", "Doors", "Fine-tune your own data"),
        *("When it hangs", "Limits", "Results"),
    ]
    beginning, _, _ = text.partition("\n## ")
    places = [beginning.index(mark) for mark in ("badge", "assets/stack.svg", "chart:begin")]
    assert places == sorted(places)


@pytest.mark.parametrize("path", sorted(DOCS.glob("assets/*.svg")), ids=lambda path: path.stem)
def test_drawings_are_well_formed_and_load_nothing(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    allowed = {"svg", "style", "rect", "path", "text", "line"}
    assert {element.tag.partition("}")[2] for element in root.iter()} <= allowed
    assert "href" not in path.read_text(encoding="utf-8")
