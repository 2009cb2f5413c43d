"""One version everywhere, and a wheel that installs exactly what it should."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deepytorch_core.base import distribution

ROOT = Path(__file__).parents[2]
EXTRAS = {
    "deepspeed",
    "fp8",
    "megatron",
    "accelerate",
    "transformers",
    "examples",
    "recipes",
    "metrics",
    "dev",
    "all",
}

MAKES_WHEELS = (".ci/wheel", ".ci/matrix", "Makefile")
SPEAK_OF_PIP = (".py", ".md", ".ipynb", ".yaml", ".yml", ".toml", "file")
SAYS_WHAT_NOT_TO_DO = {
    f"{page}: pip install deepytorch"
    for page in ("README.md", "docs/doctor.md", "docs/installing.md")
}


def changelog_version(text: str) -> str | None:
    """The version of the topmost entry: `## 1.2.3`, perhaps in brackets or with a date."""
    match = re.search(r"^## \[?v?(\d+\.\d+\.\d+)\b", text, re.MULTILINE)
    return match.group(1) if match else None


def stray_files(names: list[str]) -> list[str]:
    """Files of a wheel that would install outside of our two packages."""
    tops = ("deepytorch/", "deepytorch_core/")
    return [name for name in names if not name.startswith(tops) and ".dist-info/" not in name]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_version(project: dict[str, Any]) -> None:
    from deepytorch_core import _core

    version = project["project"]["version"]
    assert _core.__version__ == version, "rebuild the native core: make venv"
    assert changelog_version((ROOT / "CHANGELOG.md").read_text()) == version


def test_one_name_and_one_home(project: dict[str, Any]) -> None:
    name, urls = project["project"]["name"], project["project"]["urls"]
    assert name == distribution.NAME
    assert yaml.safe_load((ROOT / ".ci/conda/recipe.yaml").read_text())["package"]["name"] == name
    wheels = re.findall(
        r"\bdist/(\w+)-", "".join((ROOT / path).read_text() for path in MAKES_WHEELS)
    )
    assert set(wheels) == {name.replace("-", "_")}
    (repository,) = re.findall(r"^repo_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert urls["Repository"] == repository
    for page in ("README.md", "docs/installing.md", "docs/quickstart/index.md"):
        assert f"git clone {repository}\n" in (ROOT / page).read_text(), page


def test_nobody_is_sent_to_the_other_package() -> None:
    """pip never gets `deepytorch`, with or without extras: that name is somebody else's."""
    sent = re.compile(
        r"""deepytorch\\?\[|pip install [^`\n&;]*?(?<![\w/.-])deepytorch(?![\w/.-])"""
    )
    found = {
        f"{path}: {match[0]}"
        for path in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        if path.endswith(SPEAK_OF_PIP) and not path.startswith("tests/")
        for match in sent.finditer((ROOT / path).read_text())
    }
    assert found == SAYS_WHAT_NOT_TO_DO


def test_the_conda_recipe_asks_for_the_same(project: dict[str, Any]) -> None:
    """It names the version, what builds the package and what it needs by conda's names."""
    recipe = yaml.safe_load((ROOT / ".ci/conda/recipe.yaml").read_text())
    assert recipe["context"]["version"] == project["project"]["version"]

    def bounds(wants: list[str]) -> dict[str, SpecifierSet]:
        plain = [Requirement(want) for want in wants if "$" not in want and "-compiler" not in want]
        return {want.name.replace("pytorch", "torch"): want.specifier for want in plain}

    runs = bounds(recipe["requirements"]["run"])
    assert str(runs.pop("python")) == project["project"]["requires-python"]
    torch = runs.pop("torch")
    wants = bounds(project["project"]["dependencies"])
    assert str(wants.pop("torch")) in str(torch)
    assert runs == wants
    builds = bounds(recipe["requirements"]["host"] + recipe["requirements"]["build"])
    tools = bounds(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    assert {name: builds.get(name) for name in tools} == tools


def test_changelog_versions_are_read() -> None:
    assert changelog_version("# Changes\n\n## 1.2.3\n\n## 1.2.2\n") == "1.2.3"
    assert changelog_version("## [0.1.0] - 2026-01-31\n") == "0.1.0"
    assert changelog_version("## Unreleased\n") is None


def test_entry_points_lead_to_callables() -> None:
    found = {
        (point.group, point.name): point
        for point in metadata.distribution(distribution.NAME).entry_points
    }
    assert set(found) == {
        ("console_scripts", "deepytorch"),
        ("torch.backends", "deepytorch"),
        ("torch.distributed.backends", "deepytorch"),
        ("deepytorch.integrations", "deepspeed"),
    }
    for point in found.values():
        assert callable(point.load()), point


def test_extras(project: dict[str, Any]) -> None:
    assert set(project["project"]["optional-dependencies"]) == EXTRAS
    everything = project["project"]["optional-dependencies"]["all"]
    named = re.fullmatch(r"deepytorch-train\[(.*)\]", everything[0])
    assert named is not None
    assert set(named.group(1).split(",")) == EXTRAS - {"all"}


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_what_an_extra_asks_for_fits_what_is_pinned(extra: str, project: dict[str, Any]) -> None:
    """So that pip finds versions for all of it: those that the tests run with are among them."""
    pinned = dict(
        line.strip().lower().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    wants = [Requirement(text) for text in project["project"]["optional-dependencies"][extra]]
    assert wants
    for want in wants:
        if want.name == distribution.NAME:
            assert set(want.extras) <= EXTRAS
        else:
            assert want.specifier.contains(pinned[want.name.lower()], prereleases=True), want


def test_groups_of_the_makefile_are_pinned(project: dict[str, Any]) -> None:
    constraints = (ROOT / "constraints.txt").read_text().lower()
    used = set(re.findall(r"\.group-(\w+)", (ROOT / "Makefile").read_text()))
    assert set(project["dependency-groups"]) == used
    for wants in project["dependency-groups"].values():
        for want in wants:
            assert f"\n{Requirement(want).name.lower()}==" in constraints, want


def test_everything_installed_is_pinned(project: dict[str, Any]) -> None:
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"]]
    wanted += [want for extra, wants in extras.items() if extra != "all" for want in wants]
    names = {re.split(r"[<>=!~\[ ]", want)[0].lower() for want in wanted}
    assert not names - pinned, "add to constraints.txt"


def test_wheel_contents(tmp_path: Path) -> None:
    """The Python part of a wheel; without CMake, so in two seconds."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", str(ROOT), "-q", "-w", str(tmp_path)]
        + ["--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        + [
            "--config-settings",
            "wheel.cmake=false",
            "--config-settings",
            f"build-dir={tmp_path / 'build'}",
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"{distribution.NAME.replace('-', '_')}-")
    names = zipfile.ZipFile(wheel).namelist()
    assert not stray_files(names)
    installed = {name for name in names if name.endswith((".py", ".pyi", ".typed", ".yaml"))}
    folders = {
        "deepytorch": "deepytorch",
        "deepytorch_core": "deepytorch_core",
        "integrations": "deepytorch/integrations",
        "recipes": "deepytorch/recipes",
    }
    expected = {
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in folders.items()
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".pyi", ".typed", ".yaml"}
    }
    assert installed == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_stray_files_are_found() -> None:
    good = [
        "deepytorch/cli/main.py",
        "deepytorch_core/_core.so",
        "deepytorch_train-1.dist-info/RECORD",
    ]
    assert not stray_files(good)
    for bad in (
        "integrations/fsdp/__init__.py",
        "recipes/data/text.py",
        "tests/conftest.py",
        "setup.py",
    ):
        assert stray_files([*good, bad]) == [bad]
