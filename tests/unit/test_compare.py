"""What `run --compare` concludes from samples, and the copy-on-write view scripts run in."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepytorch.cli import compare, launcher
from deepytorch.cli.compare import failure, report
from deepytorch_core import config
from deepytorch_core.compare import result, workspace
from deepytorch_core.compare.plan import Plan
from deepytorch_core.compare.receipt import write
from deepytorch_core.compare.result import Sample, judge
from deepytorch_core.compare.saves import Saves
from deepytorch_core.errors import CompareError
from deepytorch_core.testing import run_program


def sample(arm: str, step_s: float, losses: tuple[float | None, ...] = (2.0, 1.0)) -> Sample:
    return Sample(
        arm=arm,
        steps=len(losses),
        is_complete=True,
        block_s=(step_s, 5 * step_s, step_s),
        setup_s=3.0 if arm == "ours" else 1.0,
        losses=losses,
        peak_bytes=1 << 30,
        device="cpu",
        redirected=(),
        made_folders=(),
        seams=(),
        native_calls=0,
        decisions=(),
    )


def samples(stock: list[float], ours: list[float]) -> list[Sample]:
    return [sample("stock", value) for value in stock] + [sample("ours", value) for value in ours]


@pytest.mark.parametrize(
    ("stock", "ours", "word"),
    [
        ([1.0, 1.02], [0.5, 0.51], result.FASTER),
        ([0.5, 0.51], [1.0, 1.02], result.SLOWER),
        ([1.0, 1.0], [0.99, 0.99], result.SAME),  # below the least gain
        ([1.0, 1.3], [0.8, 0.9], result.SAME),  # apart, but stock itself varies by more
        ([1.0, 2.0], [0.9, 1.5], result.SAME),
        ([1.0], [0.5], result.SAME),  # one run says nothing about the noise
    ],
)
def test_a_difference_is_claimed_only_beyond_the_noise(
    stock: list[float], ours: list[float], word: str
) -> None:
    assert judge(samples(stock, ours), "ours").word == word


def test_the_time_saved_has_the_one_off_cost_taken_off() -> None:
    verdict = judge(samples([1.0, 1.0], [0.5, 0.5]), "ours")
    assert verdict.speedup == pytest.approx(2.0)
    assert verdict.spread == pytest.approx((2.0, 2.0))
    assert verdict.saved_s(100, 1.0) == pytest.approx(50.0 - 2.0)


@pytest.mark.parametrize(
    ("ours", "difference", "relative"),
    [
        ((2.0, 1.0), 0.0, 0.0),
        ((2.1, 0.5), 0.5, 0.5),
        ((2.0, None), 0.0, 0.0),
        ((None, None), None, None),
        ((math.nan, 1.0), math.nan, math.nan),
        ((math.inf, 1.0), math.inf, math.nan),
    ],
)
def test_loss_difference(
    ours: tuple[float | None, ...], difference: float | None, relative: float | None
) -> None:
    found = result.loss_difference([sample("stock", 1.0)], [sample("ours", 1.0, ours)])
    assert repr(found) == repr((difference, relative))


def test_json_has_no_nan_and_the_receipt_refers_to_nothing(tmp_path: Path) -> None:
    runs = samples([1.0, 1.1], [0.5, 0.6]) + [sample("ours", 1.0, (math.nan, 1.0))]
    found = result.summary(runs, [judge(runs, "ours")], {"bench": "run_compare"})
    assert json.loads(json.dumps(found, allow_nan=False))["runs"][-1]["losses"] == [None, 1.0]
    page = tmp_path / "new" / "receipt.html"
    write(page, runs, command="x <y>", headline="a & b", rows=[("loss", "1 < 2")])
    text = page.read_text()
    assert "x &lt;y&gt;" in text
    assert "<svg" in text
    assert "src=" not in text


def rank_file(folder: Path, rank: int, **changes: Any) -> None:
    found: dict[str, Any] = {
        "steps": 2,
        "is_complete": True,
        "setup_s": 1.0 + rank,
        "block_s": [1.0 + rank, 2.0 - rank],
        "losses": [1.0 + rank, None],
        "peak_bytes": 10 + rank,
        "device": "cpu",
        "redirected": ["/a"],
        "made_folders": [],
        "seams": ["ddp"],
        "report": {"native_calls": 3, "delegated_calls": 0, "decisions": []},
        "script": "/home/train.py",
        "asked": {},
        "undecided": [],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps({**found, **changes}))


def test_ranks_are_put_together(tmp_path: Path) -> None:
    rank_file(tmp_path, 0)
    with pytest.raises(CompareError, match="ours: rank 1 of 2 left without a word"):
        result.read("ours", tmp_path, 2)
    rank_file(tmp_path, 1)
    found = result.read("ours", tmp_path, 2)
    assert (found.block_s, found.setup_s, found.peak_bytes) == ((2.0, 2.0), 2.0, 11)
    assert (found.losses, found.native_calls, found.redirected) == ((1.5, None), 6, ("/a",))
    rank_file(tmp_path, 1, steps=3)
    with pytest.raises(CompareError, match="different numbers"):
        result.read("ours", tmp_path, 2)


@pytest.mark.parametrize("steps", [4, 5, 12, 60, 997])
def test_blocks_end_with_the_last_step(steps: int) -> None:
    plan = Plan(steps=steps, folder="", workspace="", outside="")
    ends = (plan.warmup, *plan.block_ends)
    assert ends[-1] == steps
    assert sorted(set(ends)) == list(ends)


@pytest.mark.parametrize("largest_copy", [0, 1 << 20])
def test_what_happens_in_a_view_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest_copy: int
) -> None:
    monkeypatch.setattr(workspace, "LARGEST_COPY", largest_copy)
    source = tmp_path / "project"
    (source / "deep" / "er").mkdir(parents=True)
    for name in ("a", "b", "deep/er/c", "deep/d"):
        (source / name).write_text("old")
    (tmp_path / "beside").write_text("beside")
    # Inside the folder itself, as where TMPDIR is set to it.
    root = source / "scratch" / "root"
    root.mkdir(parents=True)
    view, whole = workspace.make(source, root)
    assert not whole
    assert (view / "deep/er/c").read_text() == "old"
    assert (view / "deep/er/c").is_symlink() == (largest_copy == 0)
    monkeypatch.chdir(view)
    assert (Path(os.getcwd()).parent / "beside").read_text() == "beside"
    assert Path("../beside").read_text() == "beside"
    workspace.before_write(workspace.located("a"), str(view), keeps_content=True)
    with open("a", "a") as file:
        file.write(" and new")
    workspace.before_write(workspace.located("deep/d"), str(view), keeps_content=False)
    Path("deep/d").write_text("new")
    os.remove("b")
    os.replace("a", "deep/er/c")
    Path("deep/er/e").write_text("new")
    assert (view / "deep/er/c").read_text() == "old and new"
    kept = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {name for name in kept if not name.startswith("scratch")} == {
        *("a", "b", "deep/er/c", "deep/d")
    }
    assert all((source / name).read_text() == "old" for name in ("a", "b", "deep/er/c", "deep/d"))


def test_a_large_tree_is_linked_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "MAX_ENTRIES", 3)
    source, root = tmp_path / "project", tmp_path / "root"
    (source / "data" / "images").mkdir(parents=True)
    for number in range(4):
        (source / "data" / str(number)).write_text("")
    root.mkdir()
    view, whole = workspace.make(source, root)
    assert whole == ["data/images"]
    assert (view / "data" / "images").is_symlink()


def test_scripts_and_what_python_does_not_write_stay_in_the_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, root = tmp_path / "project", tmp_path / "root"
    (source / "runs" / "1").mkdir(parents=True)
    (source / "latest").symlink_to("runs/1")
    root.mkdir()
    for name in ("train.py", "log.csv", "runs/1/log.csv"):
        (source / name).write_text("old")
    with sqlite3.connect(source / "results.db") as database:
        database.execute("create table runs(loss)")
    before = (source / "results.db").read_bytes()
    view, _ = workspace.make(source, root)
    monkeypatch.chdir(view)
    assert Path("train.py").resolve() == view / "train.py"
    assert Path("train.py").stat().st_mtime == (source / "train.py").stat().st_mtime
    with sqlite3.connect("results.db") as database:
        database.execute("insert into runs values (1)")
    subprocess.run("echo new > log.csv; echo new > latest/log.csv", shell=True, check=True)
    assert (view / "runs/1/log.csv").read_text() == "new\n"
    assert (source / "results.db").read_bytes() == before
    assert (source / "log.csv").read_text() == "old"
    assert (source / "runs/1/log.csv").read_text() == "old"


def test_few_and_small_files_are_copied_scripts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "LARGEST_COPY", 100)
    monkeypatch.setattr(workspace, "MOST_COPIED", 250)
    monkeypatch.setattr(workspace, "MOST_COPIES", 4)
    source = tmp_path / "project"
    (source / "data").mkdir(parents=True)
    for name in ("a.csv", "b.csv", "train.py", "data/c.csv"):
        (source / name).write_bytes(random.randbytes(100))
    (source / "large").write_bytes(random.randbytes(101))
    for number in range(4):
        (source / "data" / str(number)).write_bytes(b"")
    (tmp_path / "root").mkdir()
    view, _ = workspace.make(source, tmp_path / "root")
    copied = {path.name for path in view.rglob("*") if path.is_file() and not path.is_symlink()}
    assert "train.py" in copied
    assert len(copied & {"a.csv", "b.csv"}) == 1
    assert len(copied & set("0123")) == 2
    assert not copied & {"c.csv", "large"}
    for path in source.rglob("*"):
        if path.is_file():
            assert (view / path.relative_to(source)).read_bytes() == path.read_bytes()


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saves:
    """Of a script in the view of `project`, with a large data set and links out of it."""
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
    outside = str(tmp_path / "outside")
    return Saves(Plan(steps=4, folder="", workspace=str(view), outside=outside))


def opens(path: Path, flags: int) -> tuple[str, tuple[object, ...]]:
    return "open", (str(path), None, flags)


@pytest.mark.parametrize(
    "move",
    [  # os.replace and os.rename are looked up when called: `saves` stands in for them
        lambda source, target: os.replace(source, target),
        lambda source, target: os.rename(source, target),
        Path.rename,
        Path.replace,
        shutil.move,
    ],
)
def test_a_checkpoint_that_was_there_is_not_moved(
    saves: Saves,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    move: Callable[[Path, Path], object],
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, saves._moving(getattr(os, name)))
    last, previous = elsewhere / "last.pt", elsewhere / "previous.pt"
    with pytest.raises(CompareError, match=f"would move {last}, which was there"):
        move(last, previous)
    assert last.read_text() == "old"
    assert not saves.redirected
    # By a name that the script took before they were replaced, to one that is no checkpoint's.
    with pytest.raises(CompareError, match=f"would move {last}, which was there"):
        saves._watch("os.rename", (str(last), str(elsewhere / "old"), -1, -1))
    with pytest.raises(CompareError, match=f"would move {elsewhere}, which was there"):
        saves._watch("os.rename", (str(elsewhere), str(tmp_path / "old"), -1, -1))
    with pytest.raises(CompareError, match=f"would replace {last}, which was there"):
        saves._watch("os.rename", ("draft", str(last), -1, -1))


def test_a_draft_of_this_run_is_moved(saves: Saves, tmp_path: Path) -> None:
    replace = saves._moving(os.replace)
    draft, previous = tmp_path / "elsewhere" / "draft.pt", tmp_path / "elsewhere" / "previous.pt"
    draft.write_text("new")
    stamp = draft.stat().st_mtime - 0.01  # kernels stamp files by a clock that may be behind
    os.utime(draft, (stamp, stamp))
    saves._watch("os.rename", (str(draft), str(previous), -1, -1))
    replace(draft, previous)
    assert not draft.exists()
    assert Path(saves.redirected[str(previous)]).read_text() == "new"


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


def test_a_temporary_file_beside_old_weights_is_free(
    saves: Saves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    seen: list[Any] = []
    monkeypatch.setattr(saves, "_is_copying", False)

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
    again = Saves(Plan(steps=4, folder="", workspace=saves._view, outside=saves._outside))
    for path in kept:
        again._watch(*opens(path, os.O_WRONLY))


def job(**changes: Any) -> compare.Job:
    arguments = ("--nproc-per-node=1", "train.py", "--lr", "1")
    options = launcher.parse(arguments, command="run", default_processes="1")
    values: dict[str, Any] = {"world_size": 1, "steps": 30, "rounds": 2, "timeout_s": 1.0}
    values |= {"arms": ("stock", "deepytorch"), "default_processes": "1"}
    return compare.Job(arguments=arguments, options=options, **{**values, **changes})


def ran(arm: str, steps: int, wanted: int) -> Sample:
    losses = (1.0,) * min(steps, wanted)
    changes: dict[str, Any] = {"steps": min(steps, wanted), "is_complete": steps >= wanted}
    changes |= {"block_s": (1.0,) if arm == "stock" else (0.5,), "seams": ("transformers",)}
    return dataclasses.replace(sample(arm, 1.0, losses), **changes)


def test_a_script_that_ends_early_is_run_again_and_compared_over_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[tuple[str, int]] = []

    def run(one: compare.Job, arm: compare.Arm, remarks: list[str]) -> Sample:
        order.append((arm.name, one.steps))
        return ran(arm.name, 9, one.steps)

    monkeypatch.setattr(compare, "run_once", run)
    said: list[str] = []
    found, _ = compare.compare(job(), said.append)
    assert order == [
        ("stock", 30),
        ("stock", 9),
        ("deepytorch", 9),
        ("stock", 9),
        ("deepytorch", 9),
    ]
    assert "ends after 9 optimizer steps" in said[0]
    rows = report.findings(job(), found, [judge(found, "deepytorch")], 7200)
    kept = [value for name, value in rows if name == "to keep"]
    assert kept[0] == "deepytorch run --nproc-per-node=1 train.py --lr 1"
    assert "accelerate_trainer(trainer)" in kept[1]
    assert dict(rows)["time saved"].startswith("60.0 min of 2.0 h")


@pytest.mark.parametrize(
    ("decisions", "is_kept"),
    [
        ([], False),
        (["compile of Net: eager, not faster beyond the noise"], False),
        (["compile of Net: eager, slower", "CUDA graphs of Net: launched, it prints"], False),
        (["compile of Net: inductor, faster than eager"], True),
        (["compile of Net: eager, slower", "CUDA graphs of Net: replayed, faster"], True),
    ],
)
def test_a_line_is_told_only_for_what_was_kept(decisions: list[str], is_kept: bool) -> None:
    changes: dict[str, Any] = {"seams": ("ddp",), "decisions": tuple(decisions)}
    found = [ran("stock", 30, 30), ran("deepytorch", 30, 30)] * 2
    found = [dataclasses.replace(one, **changes) for one in found]
    rows = report.findings(job(), found, [judge(found, "deepytorch")], 0)
    kept = [value for name, value in rows if name == "to keep"]
    assert ("with deepytorch.compile(model)" in kept) == is_kept


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"stock": 3}, "ended after 3 optimizer steps; at least 4"),
        ({"stock": 0}, "took no step of a torch.optim.Optimizer"),
        ({"stock": 40, "deepytorch": 7}, "deepytorch took 7 optimizer steps where stock took 30"),
    ],
)
def test_too_few_steps(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, int], message: str
) -> None:
    def run(one: compare.Job, arm: compare.Arm, remarks: list[str]) -> Sample:
        return ran(arm.name, counts[arm.name], one.steps)

    monkeypatch.setattr(compare, "run_once", run)
    with pytest.raises(CompareError, match=message):
        compare.compare(job(), lambda line: None)


OUTPUT = """\
noise
[rank1]: Traceback (most recent call last):
[rank1]:   File "{cli}/runner.py", line 82, in <module>
[rank1]:     main(sys.argv[1:])
[rank1]:   File "<frozen runpy>", line 88, in _run_code
[rank1]:   File "/home/me/train.py", line 3, in <module>
[rank1]:     step()
[rank1]:     ~~~~^^
[rank1]: KeyError: 'weights'
[rank1]: of layer 3
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
W1123 17:21:16.213 199 torch/distributed/elastic/multiprocessing/api.py:1028] Sending ...
============
"""


def said_of(output: str, status: int | None = 1, hint: str = "") -> list[str]:
    return failure.words(output, status, arm="ours", hint=hint, limit_s=9.0).splitlines()


def test_a_failure_is_the_scripts_own_error() -> None:
    output = OUTPUT.format(cli=Path(failure.__file__).parents[1])
    assert said_of(output, hint="the way out") == [
        "the script failed with exit status 1 under the arm 'ours': KeyError: 'weights'",
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 3, in <module>',
        "    step()",
        "    ~~~~^^",
        "KeyError: 'weights'",
        "of layer 3",
        "the way out",
    ]
    chained = output.replace("of layer 3", "\nDuring handling of the above exception, another one:")
    assert '  File "/home/me/train.py", line 9, in <module>' in said_of(chained)
    assert said_of("one\ntwo\n") == [
        "the script failed with exit status 1 under the arm 'ours':",
        "one",
        "two",
    ]


def test_a_run_that_took_too_long_shows_what_it_said_last() -> None:
    said = said_of("noise\n" * 99 + OUTPUT, None)
    assert said[0].endswith("did not take its steps within 9 s (--timeout-s) under the arm 'ours':")
    assert len(said) == 41


def test_what_the_comparison_refuses_is_one_line() -> None:
    refusal = "deepytorch_core.errors.CompareError: the script would overwrite /w.pt"
    output = OUTPUT.replace("KeyError: 'weights'", refusal)
    library = '[rank1]:   File "/v/lib/python3.11/site-packages/torch/x.py", line 4, in save'
    output = output.replace("[rank1]:     step()", f"[rank1]:     step()\n{library}")
    said = "the script would overwrite /w.pt (/home/me/train.py, line 3)"
    assert said_of(output) == [said]


def test_several_machines_are_refused() -> None:
    options = launcher.parse(("--nnodes=2", "t.py"), command="run", default_processes="1")
    with pytest.raises(ValueError, match="--compare runs on one machine"):
        compare.processes(options)


def test_ranks_on_emulated_nodes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert "OMP_NUM_THREADS" not in compare._environment(job(world_size=4), {}, "/")
    on_nodes = job(world_size=4, network=object())
    assert compare._environment(on_nodes, {}, "/")["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("status", [134, 1, None])
def test_a_run_that_fails_after_it_has_measured_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int | None
) -> None:
    def launch(one: compare.Job, folder: Path, *rest: Any) -> int | None:
        for rank in range(2):
            rank_file(folder / "ranks", rank)
        (folder / "output").write_text("the end of it\n")
        return status

    monkeypatch.setattr(compare, "_launch", launch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompareError, match="the end of it"):
        compare.run_once(job(world_size=2), compare.ARMS["stock"], [])


TERMINATED = """
import sys
from deepytorch.cli import compare

# In place of torchrun: it has this process ended, and goes on by itself.
CHILD = (
    "import os, pathlib, signal, sys, time\\n"
    "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\\n"
    "os.kill(os.getppid(), signal.SIGTERM)\\n"
    "time.sleep(1000)\\n"
)
compare._command = lambda job, plan: [sys.executable, "-c", CHILD, sys.argv[1]]
compare.run_once(
    compare.Job(
        arguments=("train.py",), options=None, default_processes="1", world_size=1, steps=4,
        rounds=1, arms=("stock",), timeout_s=1000,
    ),
    compare.ARMS["stock"],
    [],
)
"""


def test_a_comparison_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its processes have a session of their own, so nobody else ends them."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run_program(
        [sys.executable, "-c", TERMINATED, tmp_path / "pid"],
        env=config.child_environment(TMPDIR=str(temporary)),
        cwd=temporary,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not list(temporary.iterdir())
