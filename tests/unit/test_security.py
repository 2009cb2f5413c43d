"""Tests what SECURITY.md promises of files, and of what comes over the network."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepytorch_core.base import config
from deepytorch_core.base.file_permissions import why_not_believed, why_not_private
from deepytorch_core.guard import profile
from deepytorch_core.network import link, nccl_table

ROOT = Path(__file__).parents[2]
PACKAGES = ("deepytorch", "deepytorch_core", "integrations", "recipes")
SOMEBODY = 12345

# Places that may unpickle objects, and why nobody else's can come there.
UNPICKLING = {
    # Horovod's own API: objects of the user's, from ranks that run the user's program.
    "integrations/horovod/functions.py": "broadcast_object and allgather_object",
    "integrations/horovod_tensorflow.py": "broadcast_object and allgather_object",
    # torch's object collectives, of what rank 0 of the same program did.
    "recipes/base/run.py": "on_main and everyones",
    # Between a training and the processes that it started to work for it, over pipes.
    "deepytorch_core/compile/ahead.py": "graphs and settings",
    "integrations/padding_free/packing_helper.py": "the configuration of a model",
    # Tests: between a test and the processes that it forked, over a socket pair.
    "deepytorch_core/testing/worker.py": "calls",
    "deepytorch_core/testing/pool.py": "results",
    "deepytorch_core/testing/failures.py": "exceptions",
}
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


def unpickled(tree: ast.AST) -> Iterator[str]:
    """Calls that make objects of bytes, torch's object collectives among them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        name = node.func.attr
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        unsafe_load = owner == "torch" and keywords.get("weights_only") != "True"
        if name in ("load", "loads") and (owner in ("pickle", "marshal", "dill") or unsafe_load):
            yield f"{owner}.{name}"
        if name == "Unpickler" or (owner == "dist" and name in OBJECT_COLLECTIVES):
            yield f"{owner}.{name}"


def test_nothing_is_unpickled_but_where_the_table_says() -> None:
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            calls = list(unpickled(ast.parse(file.read_text())))
            if calls:
                found[file.relative_to(ROOT).as_posix()] = calls
    assert set(found) == set(UNPICKLING), found


@pytest.mark.parametrize(
    "code",
    [
        *("pickle.loads(x)", "torch.load(x)", "torch.load(x, weights_only=False)"),
        *("pickle.Unpickler(x)", "dist.all_gather_object(a, b)"),
    ],
)
def test_unpickling_is_found(code: str) -> None:
    assert list(unpickled(ast.parse(code)))
    assert not list(unpickled(ast.parse("torch.load(x, weights_only=True); json.loads(x)")))


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def of_somebody_else(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, SOMEBODY, SOMEBODY)


BAD = pytest.mark.parametrize("spoil", [open_to_all, of_somebody_else])


@BAD
def test_files_of_others_are_not_believed(tmp_path: Path, spoil) -> None:
    file = tmp_path / "file"
    file.touch(0o600)
    assert why_not_private(file) is None
    assert why_not_believed(file) is None
    spoil(file)
    reason = why_not_believed(file)
    assert reason is not None
    assert str(file) in reason
    assert "remove it" in reason


def test_a_groups_file_is_believed_but_not_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o660)
    assert why_not_believed(file) is None
    assert "can be written by others" in str(why_not_private(file))


@BAD
def test_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoil
) -> None:
    path = tmp_path / "profile.json"
    monkeypatch.setattr(config, "_current", config.Options(profile=str(path)))
    profile.keep({"what": "test"}, {"chosen": "eager"})
    assert profile.find({"what": "test"}) is not None
    before = path.read_text()
    spoil(path)
    assert profile.find({"what": "test"}) is None
    profile.keep({"what": "test"}, {"chosen": "another"})
    assert path.read_text() == before
    assert "the profile is ignored" in capsys.readouterr().err


@BAD
def test_what_is_known_of_the_network(tmp_path: Path, spoil) -> None:
    path = tmp_path / "network.json"
    measured = link.Link(
        rates_bps=(1e9,) * len(link.FLOWS), round_trip_s=1e-4, busy_cores=1.0, free_cores=2.0
    )
    link.remember(path, "a/b", measured)
    assert link.recall(path, "a/b") == measured
    spoil(path)
    assert link.recall(path, "a/b") is None


@BAD
def test_the_table_for_nccl(tmp_path: Path, spoil) -> None:
    path = tmp_path / nccl_table.FILE
    nccl_table.write(path, [])
    assert json.loads(path.read_text())["choices"] == []
    spoil(path)
    with pytest.raises(ValueError, match="the table for NCCL is ignored"):
        nccl_table.choose(path, set())
