"""Adapters for torches that are not installed: a wheel is looked into, nothing of it is run."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch_core.base import torch_builds
from deepytorch_core.base.errors import AdapterError
from deepytorch_core.base.torch_builds import TorchBuild
from deepytorch_core.c10d import adapter
from deepytorch_core.c10d.adapter import Sources

COMMIT = "0123456789abcdef"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder of wheels that look like two releases of torch, with libraries that link."""
    library = tmp_path / "library.so"
    source = tmp_path / "library.c"
    source.write_text("int nothing;\n")
    subprocess.run(["cc", "-shared", "-o", library, source], check=True)
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version, local in (("2.13.0", "+cu130"), ("2.14.0", "+cu132")):
        name = f"torch-{version}-py3-none-any.whl"
        with zipfile.ZipFile(folder / name, "w") as wheel:
            wheel.writestr(
                "torch/version.py",
                f"__version__ = '{version}{local}'\ngit_version = '{COMMIT}'\n"
                "raise SystemExit('this must not run')\n",
            )
            wheel.writestr("torch/include/torch/extension.h", f'#define RELEASE "{version}"\n')
            for short in ("c10", "torch", "torch_cpu", "torch_python", "torch_cuda"):
                wheel.write(library, f"torch/lib/lib{short}.so")
            wheel.writestr("torch/nn/__init__.py", "")
            information = f"torch-{version}.dist-info"
            wheel.writestr(f"{information}/METADATA", f"Name: torch\nVersion: {version}\n")
            wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{information}/RECORD", "")
    return folder


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """A module that says which torch's headers it saw, and its own file's name."""
    root = tmp_path / "csrc"
    (root / "c10d").mkdir(parents=True)
    (root / "include").mkdir()
    (root / "c10d" / "module.cpp").write_text(
        "#include <Python.h>\n#include <torch/extension.h>\n"
        'extern "C" const char* seen() { return RELEASE " " __FILE__; }\n'
    )
    found = Sources(root)
    monkeypatch.setattr(Sources, "find", lambda: found)
    return found


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["build", *map(str, words)])
    text = f"{done.output}{'' if done.exception is None else done.exception}"
    return done.exit_code, " ".join(text.split())


def test_builds_of_one_commit_share_an_adapter() -> None:
    def name(version: str) -> str:
        return TorchBuild(version, COMMIT, 1, Path("/torch")).name

    assert name("2.13.0") == name("2.13.0+cpu") == name("2.13.0+cu130") == "torch2.13.0-01234567"
    assert name("2.13.0+rocm7.0") != name("2.13.0")
    assert name("2.13.0a0+git0123456") == "torch2.13.0a0+git0123456-01234567"
    assert name("2.12.1") != name("2.12.0")


def test_the_installed_torch() -> None:
    import torch

    build = torch_builds.installed()
    assert build.version == torch.__version__
    assert (build.root / "include" / "torch" / "extension.h").exists()
    version = torch.__version__.partition("+")[0]
    assert version.rpartition(".")[0] in {
        release.rpartition(".")[0] for release in torch_builds.RELEASES
    }
    assert adapter.tag(Sources.find()).startswith(f"torch{version}-")


def test_only_what_compiling_needs_is_unpacked(wheels: Path, tmp_path: Path) -> None:
    build = torch_builds.unpack(wheels / "torch-2.13.0-py3-none-any.whl", tmp_path / "there")
    assert build == TorchBuild("2.13.0+cu130", COMMIT, 1, tmp_path / "there" / "torch")
    names = {path.name for path in (tmp_path / "there").rglob("*") if path.is_file()}
    libraries = {f"lib{name}.so" for name in ("c10", "torch", "torch_cpu", "torch_python")}
    assert names == {"extension.h", *libraries}


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18)], ids=["no zip", "empty"])
def test_what_is_no_wheel_of_torch_says_so(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(content)
    with pytest.raises(AdapterError, match=r"x\.whl is no wheel of torch"):
        torch_builds.unpack(tmp_path / "x.whl", tmp_path)


@pytest.mark.usefixtures("sources")
def test_from_a_folder_of_wheels(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_builds, "RELEASES", ("2.13.0", "2.14.0"))
    out = tmp_path / "out"
    code, text = run("--all-torch", "--torch-wheels", wheels, "--output", out)
    assert code == 0, text
    assert text.count("adapter ready:") == 2
    for version in ("2.13.0", "2.14.0"):
        (binary,) = out.glob(f"torch{version}-{COMMIT[:8]}-*/deepytorch_c10d.so")
        content = binary.read_bytes()
        assert f"{version} csrc/c10d/module.cpp".encode() in content
        assert str(tmp_path).encode() not in content, "a folder of this machine is in it"
    assert not list(out.glob(".building-*"))


@pytest.mark.usefixtures("sources")
def test_one_that_can_not_be_had_does_not_stop_the_others(wheels: Path, tmp_path: Path) -> None:
    code, text = run(
        *("--torch", "2.12.0", "--torch", "2.14.0"),
        *("--torch-wheels", wheels, "--output", tmp_path / "out"),
    )
    assert code == 1
    assert "torch 2.12.0: no wheel of it for this Python in" in text
    assert "adapter ready:" in text
    assert "no adapter for torch 2.12.0. Without a network put torch's wheels" in text


def test_of_a_folder_the_wheel_for_this_python_is_taken(tmp_path: Path) -> None:
    this = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    linux = "linux_x86_64.linux_aarch64"
    for python in ("cp27", this):
        for version in ("2.13.0+cpu", "2.13.1"):
            (tmp_path / f"torch-{version}-{python}-{python}-{linux}.whl").touch()
    (tmp_path / "torch-is-no-wheel.whl").touch()
    found = torch_builds.pick("2.13.0", tmp_path)
    assert found.name == f"torch-2.13.0+cpu-{this}-{this}-{linux}.whl"
    with pytest.raises(AdapterError, match="no wheel of it"):
        torch_builds.pick("2.12.0", tmp_path)


def test_what_pip_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(AdapterError, match="^No matching distribution found for torch==2.12.0$"):
        torch_builds.fetch("2.12.0", tmp_path)


def test_without_pip_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(AdapterError, match="No module named pip"):
        torch_builds.fetch("2.13.0", tmp_path)
