"""Finding and building the c10d adapter, with a tiny module in place of the real sources."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepytorch_core.base import file_permissions
from deepytorch_core.base.errors import AdapterError
from deepytorch_core.c10d import adapter
from deepytorch_core.c10d.adapter import Sources

ROOT = Path(__file__).parents[2]

# Python's C interface only, so that it compiles in half a second; two files, as the real one has
# several.
MODULE = """\
#include <Python.h>
PyObject* answer();
namespace {
PyMethodDef methods[] = {
    {"answer", [](PyObject*, PyObject*) { return answer(); }, METH_NOARGS, nullptr}, {}};
PyModuleDef module_definition{PyModuleDef_HEAD_INIT, "deepytorch_c10d", nullptr, -1, methods};
}  // namespace
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_deepytorch_c10d() {
  return PyModule_Create(&module_definition);
}
"""
ANSWER = """\
#include <Python.h>
#include "answer.h"
PyObject* answer() { return PyLong_FromLong(ANSWER); }
"""

BUILD = """\
import sys
from pathlib import Path
from deepytorch_core.c10d import adapter; from deepytorch_core.base import file_permissions as trust
module = adapter.load(adapter.Sources(Path(sys.argv[1])))
print("answer", module.answer())
"""


def write_sources(folder: Path, answer: int) -> Sources:
    (folder / "c10d").mkdir(parents=True, exist_ok=True)
    (folder / "include").mkdir(exist_ok=True)
    (folder / "c10d" / "module.cpp").write_text(MODULE)
    (folder / "c10d" / "part.cpp").write_text(ANSWER)
    (folder / "include" / "answer.h").write_text(f"#define ANSWER {answer}\n")
    return Sources(folder)


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return write_sources(tmp_path / "csrc", 42)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache and a folder for temporary files of this test's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("DEEPYTORCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.delitem(sys.modules, adapter.MODULE_NAME, raising=False)
    yield tmp_path / "cache"
    sys.modules.pop(adapter.MODULE_NAME, None)


def child(sources: Sources, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(sources.root)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},  # noqa: TID251
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def compiler_script(folder: Path, before: str) -> Path:
    """A compiler that does `before` first."""
    script = folder / "slow-c++"
    script.write_text(f'#!/bin/sh\n{before}\nexec c++ "$@"\n')
    script.chmod(0o755)
    return script


def wait_for(condition: Path, process: subprocess.Popen[str]) -> None:
    while not condition.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".building-*")]


def test_compiles_once_with_two_lines_and_then_finds_it(
    sources: Sources, capfd: pytest.CaptureFixture[str]
) -> None:
    assert adapter.find(sources) is None
    module = adapter.load(sources)
    assert module.answer() == 42
    first, last = capfd.readouterr().err.splitlines()
    assert "compiling the c10d adapter for torch" in first
    assert "compiled the c10d adapter in" in last
    found = adapter.find(sources)
    assert found is not None
    assert str(found) == module.__file__
    assert adapter.build(sources=sources) == found
    assert adapter.load(sources) is module
    assert capfd.readouterr().err == ""
    assert leftovers(found.parents[1]) == []


def test_other_sources_are_another_adapter(tmp_path: Path, sources: Sources) -> None:
    first = adapter.build(sources=sources)
    changed = write_sources(tmp_path / "csrc", 43)
    assert adapter.find(changed) is None
    assert adapter.tag(changed) != first.parent.name
    assert adapter.load(changed).answer() == 43


def test_a_prebuilt_one_comes_first_and_needs_no_compiler(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = adapter.build(tmp_path / "elsewhere", sources=sources)
    assert built == tmp_path / "elsewhere" / adapter.tag(sources) / "deepytorch_c10d.so"
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / "elsewhere").rename(package / "_prebuilt")
    monkeypatch.setattr(adapter, "_HERE", package)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert adapter.load(sources).answer() == 42


def test_a_prebuilt_one_may_be_of_an_older_c_library(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_HERE", tmp_path)
    monkeypatch.setattr(adapter, "tag", lambda _: "torch2.13.0-cpython-abi1-glibc2.36-digest")

    def carry(name: str) -> Path:
        path = tmp_path / "_prebuilt" / name / "deepytorch_c10d.so"
        path.parent.mkdir(parents=True)
        path.touch()
        return path

    for name in (
        "torch2.13.0-cpython-abi1-glibc2.37-digest",
        "torch2.13.0-cpython-abi1-glibc2.4-other",
        "torch2.12.0-cpython-abi1-glibc2.36-digest",
    ):
        carry(name)
    assert adapter.find(sources) is None
    oldest = carry("torch2.13.0-cpython-abi1-glibc2.5-digest")
    assert adapter.find(sources) == oldest
    older = carry("torch2.13.0-cpython-abi1-glibc2.28-digest")
    assert adapter.find(sources) == older, "2.28 is newer than 2.5"
    same = carry("torch2.13.0-cpython-abi1-glibc2.36-digest")
    assert adapter.find(sources) == same
    monkeypatch.setattr(adapter, "tag", lambda _: "torch2.13.0-cpython-abi1-digest")
    assert adapter.find(sources) is None, "another C library than glibc"


def test_build_to_a_folder_keeps_what_is_there_unless_forced(
    sources: Sources, tmp_path: Path
) -> None:
    path = adapter.build(tmp_path / "out", sources=sources)
    before = path.stat()
    assert adapter.build(tmp_path / "out", sources=sources).stat().st_ino == before.st_ino
    forced = adapter.build(tmp_path / "out", force=True, sources=sources)
    assert forced == path
    assert forced.stat().st_ino != before.st_ino


def test_without_a_compiler_it_says_what_to_do(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(AdapterError) as caught:
        adapter.load(sources)
    for part in ("g++", "deepytorch build --output", "DEEPYTORCH_ENABLED=0", adapter.tag(sources)):
        assert part in str(caught.value)


def test_a_failed_compilation_names_the_error_and_the_log(sources: Sources) -> None:
    (sources.root / "c10d" / "part.cpp").write_text("#error this is not C++\n")
    with pytest.raises(AdapterError) as caught:
        adapter.build(sources=sources)
    assert "#error this is not C++" in str(caught.value)
    log = Path(str(caught.value).split("The compiler's output: ")[1].split(". A compiler")[0])
    assert "#error this is not C++" in log.read_text()
    assert "-std=c++20" in log.read_text()
    assert leftovers(log.parent) == []


@pytest.mark.extended
def test_of_several_processes_one_compiles(sources: Sources, places: Path, tmp_path: Path) -> None:
    # Every process is up before the compiler comes to an end, so all but one have to wait.
    go = tmp_path / "go"
    slow = compiler_script(tmp_path, f'while [ ! -e "{go}" ]; do sleep 0.05; done')
    ranks = [child(sources, CXX=str(slow), LOCAL_RANK=str(rank)) for rank in range(3)]
    assert ranks[0].stderr is not None
    first_line = ranks[0].stderr.readline()  # local rank 0 either compiles or says that it waits
    assert "compiling the c10d adapter" in first_line or "waiting for another" in first_line
    go.touch()
    output = [rank.communicate(timeout=100) for rank in ranks]
    lines = first_line + "".join(error for _, error in output)
    assert [answer for answer, _ in output] == ["answer 42\n"] * 3, lines
    assert lines.count("compiled the c10d adapter in") == 1
    assert lines.count("waiting for another process") <= 1
    assert leftovers(places) == []


def test_a_build_killed_halfway_leaves_nothing_harmful(
    sources: Sources, places: Path, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    slow = compiler_script(
        tmp_path, f'echo $$ > "{started}.new"; mv "{started}.new" "{started}"; exec sleep 1000'
    )
    victim = child(sources, CXX=str(slow))
    wait_for(started, victim)
    victim.kill()  # no cleaning up, as when the machine's memory runs out
    victim.communicate()
    os.kill(int(started.read_text()), signal.SIGKILL)  # the compiler outlives it
    assert len(leftovers(places)) == 1
    assert adapter.find(sources) is None
    assert adapter.load(sources).answer() == 42  # the lock went with its owner
    assert leftovers(places) == []


def test_ctrl_c_ends_the_compiler_and_cleans_up(
    sources: Sources, places: Path, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    # Not at once: the build has to come to where it waits for the compiler.
    slow = compiler_script(
        tmp_path,
        f'sleep 0.5; echo $$ > "{started}.new"; mv "{started}.new" "{started}"; sleep 1000',
    )
    build = child(sources, CXX=str(slow))
    wait_for(started, build)
    build.send_signal(signal.SIGINT)
    _, error = build.communicate(timeout=60)
    assert "KeyboardInterrupt" in error
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert leftovers(places) == []


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_damaged_binary_is_compiled_again(
    is_noted: bool, sources: Sources, capfd: pytest.CaptureFixture[str]
) -> None:
    path = adapter.build(sources=sources)
    path.write_bytes(path.read_bytes()[:100])
    if is_noted:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.with_name(f"{path.name}.sha256").write_text(digest)
    capfd.readouterr()
    assert adapter.load(sources).answer() == 42
    error = capfd.readouterr().err
    assert ("can't be imported" in error) == is_noted
    assert "compiled the c10d adapter" in error


def test_a_cache_that_cannot_be_written_gives_way_to_a_private_folder(
    sources: Sources,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # Below a file no folder can be made, for root neither.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPYTORCH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    path = adapter.build(sources=sources)
    private = tmp_path / "tmp" / f"deepytorch-{os.geteuid()}"
    assert private in path.parents
    assert private.stat().st_mode & 0o777 == 0o700
    error = capfd.readouterr().err
    assert "can't be used" in error
    assert "DEEPYTORCH_CACHE_DIR" in error
    assert adapter.find(sources) == path


def test_a_cache_below_a_folder_that_others_can_write_gives_way_too(
    sources: Sources,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("DEEPYTORCH_CACHE_DIR", str(shared / "cache"))
    assert adapter.load(sources).answer() == 42
    error = capfd.readouterr().err
    assert f"{shared} can be written by others; keeping the adapter in {tmp_path / 'tmp'}" in error
    found = adapter.find(sources)
    assert found is not None
    assert tmp_path / "tmp" in found.parents


def test_a_umask_that_lets_groups_write_makes_no_difference(sources: Sources) -> None:
    before = os.umask(0o002)
    try:
        path = adapter.build(sources=sources)
    finally:
        os.umask(before)
    assert adapter.find(sources) == path


@pytest.fixture
def read_only_home(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which nobody can make a file or a folder, root neither."""
    for name in ("DEEPYTORCH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = Path("/proc/sys")
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.mark.usefixtures("read_only_home")
def test_with_a_read_only_home_it_compiles_elsewhere_and_says_where(
    sources: Sources, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert adapter.load(sources).answer() == 42
    error = capfd.readouterr().err
    assert str(tmp_path / "tmp" / f"deepytorch-{os.geteuid()}") in error
    assert "DEEPYTORCH_CACHE_DIR names a better place" in error


def test_with_nowhere_to_write_it_says_what_to_set(
    sources: Sources, read_only_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(read_only_home))
    with pytest.raises(AdapterError) as caught:
        adapter.load(sources)
    assert str(caught.value).count("can't be used") == 2
    assert "Set DEEPYTORCH_CACHE_DIR to a folder of your own" in str(caught.value)


def test_two_users_of_one_cache_do_not_meet(
    sources: Sources, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = adapter.build(sources=sources)
    mode_of_mine = mine.parents[1].stat().st_mode & 0o777
    assert mode_of_mine == 0o700
    other_user = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other_user)
    assert adapter.find(sources) is None
    assert adapter.cache_folders()[0] == places / f"adapter-{other_user}"


def test_a_folder_of_another_user_is_never_loaded_from(
    sources: Sources,
    places: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    adapter.build(sources=sources)
    capfd.readouterr()
    # As seen by another user, for whose name the folder has been put there beforehand.
    other_user = os.geteuid() + 12345
    (places / f"adapter-{os.geteuid()}").rename(places / f"adapter-{other_user}")
    monkeypatch.setattr("os.geteuid", lambda: other_user)
    # Files of root are trusted by everyone, and these tests may be run by root.
    monkeypatch.setattr(file_permissions, "_trusted", lambda: {other_user})
    assert adapter.find(sources) is None
    # The same has happened to the folder among the temporary files: nothing is left but to say so.
    (tmp_path / "tmp" / f"deepytorch-{other_user}").mkdir()
    with pytest.raises(AdapterError, match="DEEPYTORCH_CACHE_DIR") as caught:
        adapter.build(sources=sources)
    assert str(caught.value).count("belongs to another user") == 2


def test_what_others_can_write_is_not_loaded(sources: Sources) -> None:
    binary = adapter.build(sources=sources)
    for target in (binary.parents[1], binary.parent, binary):  # the cache, the tag's folder
        before = target.stat().st_mode
        target.chmod(0o777)
        assert adapter.find(sources) is None, target
        target.chmod(before)
        assert adapter.find(sources) == binary, target


def test_state_in_words(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sources, "find", lambda: sources)
    assert "not compiled yet" in adapter.state()
    path = adapter.build()
    assert adapter.state() == f"compiled: {path}"


def test_missing_sources_are_an_adapter_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_HERE", tmp_path / "package")
    with pytest.raises(AdapterError, match="reinstall deepytorch-train"):
        adapter.build()
