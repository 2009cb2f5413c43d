"""A script under `run --compare` loses nothing of the user's, and leaves no weights behind."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepytorch_core.base import config
from deepytorch_core.base.errors import CompareError
from deepytorch_core.compare import made, weights, workspace
from deepytorch_core.compare.plan import Plan
from deepytorch_core.compare.saves import Saves

LARGE = bytes(range(256)) * 5000  # linked in a view


BEGAN = time.time()


def plan(view: str, outside: str) -> Plan:
    return Plan(steps=4, folder="", workspace=view, outside=outside, began=BEGAN)


def end(script: Saves) -> None:
    """As the comparison does when the script's processes are gone."""
    with script._copying():
        made.clear(Path(script._outside), BEGAN)


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saves:
    """Return saves of a script in the view of `project`, with a large data set and links out."""
    monkeypatch.setattr(workspace, "MAX_ENTRIES", 7)
    source, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (source / "data" / "images").mkdir(parents=True)
    for folder in (elsewhere, source / "runs", tmp_path / "root", tmp_path / "outside"):
        folder.mkdir()
    (source / "linked").symlink_to(elsewhere)
    for name in ("history.csv", "runs/log", "data/0", "data/1", "data/2", "data/images/0"):
        (source / name).write_text("old")
    (elsewhere / "last.pt").write_text("old")
    os.utime(elsewhere / "last.pt", (1, 1))
    view, whole = workspace.make(source, tmp_path / "root")
    assert whole == ["data/images"]
    monkeypatch.chdir(view)
    return Saves(plan(str(view), str(tmp_path / "outside")))


Hook = Callable[[str, tuple[Any, ...]], None]


@pytest.fixture(scope="module")
def hooks() -> list[Hook]:
    """Hooks for what the interpreter does; there is one of Python's, which stays for ever."""
    called: list[Hook] = []

    def tell(event: str, args: tuple[Any, ...]) -> None:
        for hook in called:
            hook(event, args)

    sys.addaudithook(tell)
    return called


@pytest.fixture
def script(saves: Saves, hooks: list[Hook], monkeypatch: pytest.MonkeyPatch) -> Iterator[Saves]:
    """`saves` at work in this process, until the test ends."""
    for name in ("safetensors.torch", "safetensors.numpy"):
        pytest.importorskip(name)
    import torch.distributed.checkpoint.filesystem  # noqa: F401

    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    saves.install()
    yield saves
    hooks.clear()
    saves._patches.undo()


def old(script: Saves, path: Path, content: bytes = b"old") -> Path:
    """A file that was there before."""
    with script._copying():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (1, 1))
    return path


def opens(path: Path, flags: int) -> tuple[str, tuple[object, ...]]:
    return "open", (str(path), None, flags)


@pytest.mark.parametrize(
    "move",
    [  # os.replace and os.rename are looked up when called: `script` stands in for them
        lambda source, target: os.replace(source, target),
        lambda source, target: os.rename(source, target),
        Path.rename,
        Path.replace,
        shutil.move,
    ],
)
def test_a_checkpoint_that_was_there_is_not_moved(
    script: Saves, tmp_path: Path, move: Callable[[Path, Path], object]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    last, previous = elsewhere / "last.pt", elsewhere / "previous.pt"
    with pytest.raises(CompareError, match=f"would move {last}, which was there"):
        move(last, previous)
    assert last.read_text() == "old"
    assert not script.redirected
    with pytest.raises(CompareError, match=f"would move {last}, which was there"):
        move(last, elsewhere / "old")  # no checkpoint's name
    with pytest.raises(CompareError, match=f"would move {elsewhere}, which was there"):
        move(elsewhere, tmp_path / "old")
    # By a name that the script took before they were replaced.
    with pytest.raises(CompareError, match=f"would replace {last}, which was there"):
        script._watch("os.rename", ("draft", str(last), -1, -1))


@pytest.mark.parametrize("name", ["previous.pt", "last.pt"])
def test_a_draft_of_this_run_is_moved(script: Saves, tmp_path: Path, name: str) -> None:
    draft, target = tmp_path / "elsewhere" / "draft", tmp_path / "elsewhere" / name
    torch.save({}, draft)
    os.replace(draft, target)
    assert not draft.exists()
    assert torch.load(target) == {}
    assert str(target) in script.redirected
    end(script)
    assert [path.read_text() for path in draft.parent.iterdir()] == ["old"]


def test_the_real_folder_is_not_changed(saves: Saves, tmp_path: Path) -> None:
    source = tmp_path / "project"
    real = str(source / "history.csv")
    changes: list[tuple[str, tuple[object, ...]]] = [
        opens(source / "history.csv", os.O_WRONLY | os.O_TRUNC),
        opens(source / "history.csv", os.O_RDWR),
        opens(source / "data" / "new.npy", os.O_WRONLY | os.O_CREAT),
        ("os.remove", (real, -1)),
        ("shutil.rmtree", (str(source / "runs"), None)),
        ("shutil.rmtree", (str(source / "data" / "images"), None)),
        ("os.rename", (real, "mine.csv", -1, -1)),
        ("os.rename", ("history.csv", real, -1, -1)),
    ]
    for event, args in changes:
        with pytest.raises(CompareError, match=rf"would .* {source}.* itself, not its copy"):
            saves._watch(event, args)


def test_reading_and_what_is_linked_whole_are_free(saves: Saves, tmp_path: Path) -> None:
    source = tmp_path / "project"
    saves._watch(*opens(source / "history.csv", os.O_RDONLY))
    for path in (
        *(Path("history.csv"), Path("data/new.npy"), Path("linked/new.npy")),
        *(Path("data/images/new.npy"), source / "data" / "images" / "new.npy"),
        *(source / "runs" / "set.lock", source / "__pycache__" / "helper.pyc.1"),
        *(tmp_path / "elsewhere" / "new.npy", Path("../elsewhere/new.npy")),
    ):
        saves._watch(*opens(path, os.O_WRONLY | os.O_CREAT))
    saves._watch("os.remove", ("history.csv", -1))
    saves._watch("os.rename", ("history.csv", "linked/history.csv", -1, -1))


def test_a_temporary_file_beside_old_weights_is_free(saves: Saves, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    seen: list[Any] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and watched:
            seen.append(args[0])
            saves._watch(event, args)

    watched = True
    sys.addaudithook(watch)
    try:
        with tempfile.NamedTemporaryFile(dir=elsewhere) as file:
            file.write(b"new")
        with pytest.raises(CompareError, match="would overwrite"):
            (elsewhere / "last.pt").write_text("new")
    finally:
        watched = False
    assert str(elsewhere) in map(str, seen)


def test_folders_of_torchs_compiler_are_not_the_scripts(saves: Saves, tmp_path: Path) -> None:
    saves._watch("os.mkdir", (str(tmp_path / "torchinductor_me" / "ab"), 511, -1))
    saves._watch("os.mkdir", (str(tmp_path / "elsewhere" / "new"), 511, -1))
    assert saves.made_folders == [str(tmp_path / "elsewhere" / "new")]


def test_what_libraries_keep_in_the_folder_is_free(
    saves: Saves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "project"
    kept = [source / ".cache" / "hub", source / "kept" / "links.json", source / "profile.7.tmp"]
    for path in kept:
        with pytest.raises(CompareError, match="itself, not its copy"):
            saves._watch(*opens(path, os.O_WRONLY))
    monkeypatch.setenv("HOME", str(source))
    monkeypatch.setenv("DEEPYTORCH_CACHE_DIR", str(source / "kept"))
    monkeypatch.setattr(config, "profile_path", lambda: source / "profile")
    again = Saves(plan(saves._view, saves._outside))
    for path in kept:
        again._watch(*opens(path, os.O_WRONLY))


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", "a")
    return file.getvalue()


CONTENTS = [
    *("last.pth.tar", "last.pkl", "last.pickle", "last.npz", "last.npy", "last.h5", "last.pt2"),
    *("last.onnx", "last.gguf", "last.model", "last.ot", "last.mar", "last.tar", "last.PTH"),
    *("last.pth.bak", "last.pkl.1"),
]
HEADS = [zipped(), b"\x80\x04\x95abc", (8).to_bytes(8, "little") + b'{"a": 1}', b"\x93NUMPY\1"]
FREE = [
    *[("log.txt", b"old"), ("train.log", zipped()), ("metrics.json", b"{}"), ("args.yaml", b"")],
    *[("log.csv", b"\x80\x04"), ("events.out.tfevents.1.host", zipped()), ("a.xlsx", zipped())],
    *[("kept", b"old"), ("empty", b""), (".cache/hub/blob", zipped()), ("hf_cache/a.npy", b"")],
    *[("torchinductor_me/ab/cd", zipped()), ("models--me--it/blobs/12", zipped())],
]
LOSSES: list[Callable[[Path], object]] = [
    os.remove,
    lambda path: path.write_bytes(b""),
    lambda path: path.rename(path.with_name("previous")),
    lambda path: os.rename(src="draft", dst=path.with_suffix(path.suffix)),
    lambda path: os.truncate(path, 1),
    lambda path: shutil.rmtree(path.parent),
    lambda path: shutil.copyfile("draft", path),
]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *[(name, b"old") for name in CONTENTS],
        *[("state", head) for head in HEADS],
        ("last.pt", b"old"),
    ],
)
def test_what_could_be_weights_is_not_lost(
    script: Saves, tmp_path: Path, name: str, content: bytes
) -> None:
    script._patches.undo()  # what follows is seen by the audit hook alone
    path = old(script, tmp_path / "weights" / name, content)
    Path("draft").write_text("new")
    for lose in LOSSES:
        with pytest.raises(CompareError, match=r"would \w+ .*, which was there before"):
            lose(path)
    assert path.read_bytes() == content
    assert [entry.name for entry in path.parent.iterdir()] == [name]


@pytest.mark.parametrize(("name", "content"), FREE)
def test_other_files_are_written_as_ever(
    script: Saves, tmp_path: Path, name: str, content: bytes
) -> None:
    path = tmp_path / "results" / name
    old(script, path, content)
    os.truncate(path, 0)
    path.write_bytes(b"new")
    path.with_name("draft").write_bytes(b"newer")
    os.replace(path.with_name("draft"), path)
    path.rename(path.with_name("previous"))
    path.with_name("previous").unlink()
    assert not script.redirected


def scripted() -> Any:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    return torch.jit.script(Twice())


def exported() -> Any:
    return torch.export.export(torch.nn.Identity(), (torch.ones(1),))


def written(path: Path) -> None:
    torch._C.PyTorchFileWriter(str(path)).write_end_of_file()


WRITERS: dict[str, Callable[[Path], object]] = {
    "torch.save": lambda path: torch.save({}, path),
    "torch.save by keywords": lambda path: torch.save(obj={}, f=str(path)),
    "legacy": lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
    "torch.jit.save": lambda path: torch.jit.save(scripted(), str(path)),
    "ScriptModule.save": lambda path: scripted().save(str(path)),
    "ScriptFunction.save": lambda path: torch.jit.script(torch.nn.functional.relu).save(str(path)),
    "torch.export.save": lambda path: torch.export.save(exported(), path),
    "PyTorchFileWriter": written,
    "safetensors.torch": lambda path: sys.modules["safetensors.torch"].save_file(
        {"a": torch.ones(1)}, path
    ),
    "safetensors.numpy": lambda path: sys.modules["safetensors.numpy"].save_file(
        {"a": torch.ones(1).numpy()}, filename=str(path)
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITERS)
def test_writers_of_weights_spare_what_was_there(script: Saves, tmp_path: Path, name: str) -> None:
    linked, elsewhere = tmp_path / "project" / "large.pt2", tmp_path / "elsewhere" / "last.pt2"
    old(script, linked, LARGE)
    old(script, elsewhere)
    os.symlink(linked, "large.pt2")
    new = tmp_path / "elsewhere" / "new.pt2"
    for path in (Path("large.pt2"), elsewhere, new):
        WRITERS[name](path)
    assert linked.read_bytes() == LARGE
    assert elsewhere.read_bytes() == b"old"
    assert not Path("large.pt2").is_symlink()
    assert new.stat().st_size > 0  # seen by whatever looks for it
    assert script.redirected == {str(elsewhere), str(new)}
    if name.startswith("torch.save"):
        assert torch.load(f=elsewhere) == torch.load(new) == {}
    os.remove(path=elsewhere)  # what was written in its place
    assert elsewhere.read_bytes() == b"old"
    end(script)
    assert not new.exists()
    assert elsewhere.read_bytes() == b"old"


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_spare_what_was_there(script: Saves, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    shard = old(script, tmp_path / "elsewhere" / "old" / "__0_0.distcp")
    new = tmp_path / "elsewhere" / "new"
    for folder in (shard.parent, new):
        dcp.save({"a": torch.ones(1)}, checkpoint_id=folder, no_dist=True)
        found = {"a": torch.zeros(1)}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        assert found["a"] == 1
    assert (new / ".metadata").exists()
    end(script)
    assert not new.exists()
    assert [path.read_bytes() for path in shard.parent.iterdir()] == [b"old"]


@pytest.mark.parametrize(
    "change",
    [
        lambda name: os.truncate(name, 1),
        lambda name: os.chmod(name, 0o600),
        lambda name: os.utime(name, (1, 1)),
        lambda name: os.chown(name, os.getuid(), os.getgid()),
        lambda name: os.setxattr(name, "user.a", b"1"),
        lambda name: os.link(name, "other") or Path("other").write_text("new"),
        lambda name: torch.from_file(name, shared=True, size=4, dtype=torch.uint8).fill_(7),
    ],
)
def test_a_linked_file_becomes_the_views_own_before_it_changes(
    script: Saves, tmp_path: Path, change: Callable[[str], object]
) -> None:
    real = tmp_path / "project" / "large"
    old(script, real, LARGE)
    os.symlink(real, "large")
    before = real.stat()
    change("large")
    for what in ("st_mode", "st_uid", "st_nlink", "st_size", "st_mtime_ns", "st_ctime_ns"):
        assert getattr(real.stat(), what) == getattr(before, what)
    assert real.read_bytes() == LARGE
    assert not Path("large").is_symlink()
    with pytest.raises(CompareError, match="itself, not its copy"):
        os.utime(real)


@pytest.mark.parametrize(
    ("name", "is_lost"),
    [
        *[("config.json", True), ("args.yaml", True), ("vocab.txt", True), ("latest", True)],
        *[("log.txt", False), ("log.csv", False), ("metrics.jsonl", False)],
    ],
)
def test_old_weights_keep_what_describes_them(
    script: Saves, tmp_path: Path, name: str, is_lost: bool
) -> None:
    path = old(script, tmp_path / "final" / name)
    old(script, tmp_path / "final" / "model.safetensors")
    if is_lost:
        with pytest.raises(CompareError, match=f"would overwrite {path}, which was there"):
            path.write_text("new")
    else:
        path.write_text("new")
    with open(path, "a") as file:
        file.write("new")


def test_a_pointer_belongs_to_the_folders_beside_it(script: Saves, tmp_path: Path) -> None:
    latest = old(script, tmp_path / "run" / "latest")
    old(script, tmp_path / "run" / "step5" / "model.pt")
    with pytest.raises(CompareError, match=f"would replace {latest}"):
        os.replace(Path("history.csv"), latest)


def test_arguments_are_taken_by_name_and_by_folder(script: Saves, tmp_path: Path) -> None:
    Path("a").write_text("a")
    os.rename(src="a", dst="b")
    os.replace(src=b"b", dst="c")
    folder = os.open(".", os.O_RDONLY)
    os.rename("c", dst="d", src_dir_fd=folder, dst_dir_fd=folder)
    os.remove("d", dir_fd=folder)
    os.close(folder)
    assert not any(map(os.path.exists, "abcd"))
    with pytest.raises(TypeError):
        os.rename("a")  # type: ignore[call-arg]


def test_a_move_between_disks_is_a_copy(
    saves: Saves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(source: str, target: str) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    move = saves._moving(rename)
    monkeypatch.setattr(os, "rename", move)
    Path("draft").write_text("new")
    move("draft", tmp_path / "elsewhere" / "new.pt")
    assert (tmp_path / "elsewhere" / "new.pt").read_text() == "new"
    with pytest.raises(OSError, match="cross-device"):
        move(tmp_path / "elsewhere" / "new.pt", tmp_path / "new.pt")


def test_what_a_run_makes_elsewhere_does_not_outlive_it(script: Saves, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere"
    notes = old(script, there / "notes")
    with open(there / "handle", "wb") as file:
        torch.save({}, file)
    shutil.copy2(there / "handle", there / "copy")
    os.symlink("handle", there / "link")
    (there / "draft").mkdir()
    torch.save({}, there / "draft" / "model.pt")
    (there / "draft" / "config.json").write_text("{}")
    os.rename(there / "draft", there / "step1")
    os.mkdir("inner")
    torch.save({}, "inner/weights.pt")
    shutil.move("inner", there / "inner")
    (there / "log.txt").write_text("new")
    # A file that was there takes the place of a new one: it stays.
    (there / "b.pkl").write_bytes(b"new")
    os.replace(notes, there / "b.pkl")
    assert torch.load(there / "copy") == torch.load(there / "link") == {}
    end(script)
    kept = {path.relative_to(there).as_posix() for path in there.rglob("*")}
    assert kept == {"last.pt", "b.pkl", "log.txt", "step1", "inner"}
    assert (there / "b.pkl").read_bytes() == b"old"


def test_old_is_what_is_older_than_the_run_for_every_rank(saves: Saves, tmp_path: Path) -> None:
    new = tmp_path / "elsewhere" / "new.pt"
    new.write_text("another rank's")
    late = Saves(plan(saves._view, saves._outside))
    assert late.place(new) == str(new)
    last = str(tmp_path / "elsewhere" / "last.pt")
    Path(saves.place(last)).write_text("new")
    assert Path(late._found(last)).read_text() == "new"


def test_a_fork_keeps_the_same_journal(script: Saves, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere"
    (there / "log.txt").write_text("new")
    child = os.fork()
    if not child:
        with open(there / "state", "wb") as file:
            torch.save({}, file)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (there / "state").exists()
    end(script)
    assert {path.name for path in there.iterdir()} == {"last.pt", "log.txt"}


@pytest.mark.parametrize("name", ["tokens.npy", "split.pkl", "shard-0.tar", "set.npz", "set.zip"])
def test_data_that_a_script_prepares_stays(script: Saves, tmp_path: Path, name: str) -> None:
    path = tmp_path / "elsewhere" / name
    path.write_bytes(zipped() if name.endswith("z") else b"\x80\x04\x95abc")
    end(script)
    assert path.exists()
    next_one = Saves(plan(script._view, script._outside))
    next_one._watch(*opens(path, os.O_WRONLY | os.O_TRUNC))  # is not the user's


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert not weights.could_be(str(tmp_path / "pipe"))
