"""Checks that what people see looks as it did: report, machine, the README's chart, docs pages.

`make test-pictures` runs it. Pictures of what is seen now are written to build/pictures; if a
change is meant, look at them and copy them to tests/pictures/expected.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageDraw
from typer.testing import CliRunner

from deepytorch import cli

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXPECTED, SEEN = HERE / "expected", ROOT / "build/pictures"
MACHINE = ROOT / "tests/unit/data/machines/8xh100_nvswitch.json"
MOST_BYTES = 100_000


def _load(name: str) -> object:
    spec = importlib.util.spec_from_file_location(f"pictures_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


look = _load("look")


def run(*arguments: str) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, f"{result.output}\n{result.exception}"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("report") / "report.html"
    files = [str(HERE / "data" / f"rank{rank}.json") for rank in range(4)]
    run("report", *files, str(HERE / "data/compared.json"), "--html", str(page))
    return page


def compare(name: str) -> None:
    """Compare what is seen with what was expected."""
    expected, seen = EXPECTED / f"{name}.png", SEEN / f"{name}.png"
    assert expected.exists(), f"look at {seen} and copy it to {expected}"
    assert expected.stat().st_size <= MOST_BYTES
    difference = look.difference(Image.open(seen), Image.open(expected))
    assert not difference, f"{seen} does not look like {expected}: {difference}"


def test_the_report(report: Path) -> None:
    look.shoot(report, SEEN / "report.png", width=960, height=2300)
    compare("report")


def test_the_report_is_readable_when_dark_and_narrow(report: Path) -> None:
    look.shoot(report, SEEN / "report-dark-narrow.png", width=500, height=2900, dark=True)
    compare("report-dark-narrow")


def test_the_picture_of_a_machine(tmp_path: Path) -> None:
    drawing = tmp_path / "machine.svg"
    run("topology", "--from", str(MACHINE), "--svg", str(drawing))
    look.shoot(drawing, SEEN / "topology.png", width=1390, height=520)
    compare("topology")


def test_a_page_of_the_documentation() -> None:
    page = ROOT / "build/site/how-it-works.html"
    assert page.exists(), "build the site first: make docs"
    # So narrow that the list of all pages, which grows, is folded away.
    look.shoot(page, SEEN / "docs.png", width=1180, height=1100)
    compare("docs")


WIDE, NARROW = 1180, 500


@pytest.mark.parametrize("width", [760, 380])
def test_the_chart_of_the_readme(width: int) -> None:
    name = f"readme-chart-{width}"
    drawing = ROOT / "docs/assets/training.svg"
    look.shoot(drawing, SEEN / f"{name}.png", width=width, height=width // 2, dark=width == 380)
    compare(name)


@pytest.mark.parametrize(("page", "height"), [("index", 1500), ("results", 1300)])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_pages_that_people_see_first(page: str, height: int, width: int) -> None:
    """On the narrow one, which is dark, no table and no chart is cut."""
    name, height = f"{page}-{width}", height if width == WIDE else 2 * height
    site = ROOT / f"build/site/{page}.html"
    look.shoot(site, SEEN / f"{name}.png", width=width, height=height, dark=width == NARROW)
    compare(name)


@pytest.fixture
def picture() -> Image.Image:
    return Image.open(EXPECTED / "report.png").convert("RGB")


def test_small_differences_are_none(picture: Image.Image) -> None:
    moved = ImageChops.offset(picture, 3, 2)
    assert look.difference(picture, moved) == ""
    soft = picture.resize([size // 2 for size in picture.size]).resize(picture.size)
    assert look.difference(picture, soft) == ""
    assert look.difference(picture, picture.point(lambda value: max(0, value - 8))) == ""


def test_what_a_reader_would_see_is_one(picture: Image.Image) -> None:
    def changed(box: tuple[int, int, int, int], color: str) -> Image.Image:
        other = picture.copy()
        ImageDraw.Draw(other).rectangle(box, fill=color)
        return other

    width, height = picture.size
    assert look.difference(picture, changed((0, 0, width, 60), "white")), "the headline is gone"
    assert look.difference(picture, changed((100, 300, 500, 340), "red")), "a bar's colour"
    assert look.difference(picture, changed((0, 500, width // 4, 800), "white")), "half a plot"
    assert look.difference(picture, changed((0, 340, width, 360), "white")), "a rank is missing"
    assert look.difference(picture, picture.rotate(180)), "upside down"
    assert look.difference(picture, picture.crop((0, 0, width, height - 20))), "it ends earlier"
    assert look.difference(picture, ImageChops.offset(picture, 0, 40)), "it lies lower"
