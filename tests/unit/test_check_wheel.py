"""The check that a built wheel must pass finds what it is for."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
CLEAN = b"\x7fELF..GLIBC_2.2.5..GLIBC_2.28..\x0080-real 90a-real 90-virtual\0"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / ".ci/check_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load()


def wheel(folder: Path, core: bytes, adapter: bytes = CLEAN) -> Path:
    path = folder / "deepytorch_train-1-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("deepytorch_core/_core.so", core)
        name = "deepytorch_core/_prebuilt/torch2.13.0-abcd-glibc2.34-digest/deepytorch_c10d.so"
        archive.writestr(name, adapter)
    return path


def test_a_good_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = wheel(tmp_path, CLEAN, CLEAN + b"GLIBC_2.34\0")
    assert check.main(path, ["/home/me", "/usr"]) == 0
    said = capsys.readouterr().out
    assert "GPU code: 80-real, 90a-real, 90-virtual" in said
    assert "adapters: torch2.13.0" in said
    assert "WRONG" not in said


@pytest.mark.parametrize(
    ("core", "adapter", "words"),
    [
        (CLEAN + b"/home/me/csrc/a.cpp\0", CLEAN, "_core.so contains the folder /home/me"),
        (CLEAN, CLEAN + b"/home/me/torch\0", "deepytorch_c10d.so contains the folder /home/me"),
        (CLEAN + b"GLIBC_2.29\0", CLEAN, "needs glibc 2.29, newer than 2.28"),
        (CLEAN, CLEAN + b"GLIBC_2.36\0", "needs glibc 2.36, newer than 2.34"),
        (CLEAN + b"\0.debug_info\0", CLEAN, "has symbols for debugging"),
    ],
)
def test_what_is_wrong_is_named(
    core: bytes, adapter: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(wheel(tmp_path, core, adapter), ["/home/me"]) == 1
    assert words in capsys.readouterr().out


def test_a_wheel_for_this_machine_alone_is_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path, CLEAN)
    with pytest.raises(SystemExit, match="names no C library"):
        check.main(path.rename(tmp_path / "deepytorch_train-1-cp311-cp311-linux_x86_64.whl"), [])


def test_the_core_names_no_folder_of_its_sources() -> None:
    """The installed one: what the compiler was told for the wheel holds for every build."""
    from deepytorch_core import _core

    assert _core.__file__ is not None
    assert str(ROOT / "csrc").encode() not in Path(_core.__file__).read_bytes()


@pytest.mark.parametrize(
    ("name", "found"), [("sh", True), ("no-such-python", False), ("/bin/sh", True)]
)
def test_a_python_is_found_by_running_it(name: str, found: bool) -> None:
    done = subprocess.run([ROOT / ".ci/find-python", name], capture_output=True, text=True)
    assert (done.returncode == 0) == found
    assert bool(done.stdout) == found
