"""Tests what `run --compare` concludes from samples, and the copy-on-write view of scripts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepytorch.cli import compare, launcher
from deepytorch.cli.compare import report
from deepytorch_core.base import config
from deepytorch_core.base.errors import CompareError
from deepytorch_core.compare import result, workspace
from deepytorch_core.compare.losses import largest_difference
from deepytorch_core.compare.plan import UNTIMED_STEPS, Plan
from deepytorch_core.compare.receipt import write
from deepytorch_core.compare.result import Sample, judge
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
        native_calls=8 if arm == "ours" else 0,
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
        ([0.201, 0.012], [0.0108, 0.011], result.SAME),  # the very first run, of a cold disk
    ],
)
def test_a_difference_is_claimed_only_beyond_the_noise(
    stock: list[float], ours: list[float], word: str
) -> None:
    assert judge(samples(stock, ours), "ours").word == word


@pytest.mark.parametrize(
    ("part", "faster"),
    [
        ({}, result.NOT_OURS),
        ({"native_calls": 1}, result.FASTER),
        ({"seams": ("accelerate",)}, result.FASTER),
        ({"decisions": ("AdamW: fused",), "kept": 1}, result.FASTER),
        ({"decisions": ("compile of Net: eager, slower",)}, result.NOT_OURS),
    ],
)
def test_it_is_faster_only_by_what_was_done(part: dict[str, Any], faster: str) -> None:
    for stock, ours, word in [([1.0, 1.0], [0.5, 0.5], faster), ([1.0], [1.0], result.SAME)]:
        found = [dataclasses.replace(measured, native_calls=0) for measured in samples(stock, ours)]
        found[-1] = dataclasses.replace(found[-1], **part)
        assert judge(found, "ours").word == word
    slow = [
        dataclasses.replace(measured, native_calls=0)
        for measured in samples([0.5, 0.5], [1.0, 1.0])
    ]
    assert judge(slow, "ours").word == result.SLOWER


def test_the_time_saved_has_the_one_off_cost_taken_off() -> None:
    verdict = judge(samples([1.0, 1.0], [0.5, 0.5]), "ours")
    assert verdict.speedup == pytest.approx(2.0)
    assert verdict.spread == pytest.approx((2.0, 2.0))
    assert verdict.saved_s(100, 1.0) == pytest.approx(50.0 - 2.0)


@pytest.mark.parametrize(
    ("setups", "cost", "said"),
    [
        ((20.0, 6.0, 5.0, 5.6), 0.8, "+0.8 s until"),  # not -6.7 s: stock's first filled caches
        ((20.0, 6.0), None, "not known from one run of each arm"),
        ((20.0, 6.0, 5.0, 5.6, 4.0, 7.0), 1.5, "+1.5 s until"),
    ],
)
def test_the_first_run_of_all_says_nothing_of_the_one_off_cost(
    setups: tuple[float, ...], cost: float | None, said: str
) -> None:
    arms = ["stock", "deepytorch"] * (len(setups) // 2)
    found = [
        dataclasses.replace(sample(arm, 1.0), setup_s=setup_s)
        for arm, setup_s in zip(arms, setups, strict=True)
    ]
    verdict = judge(found, "deepytorch")
    assert verdict.setup_cost_s == (None if cost is None else pytest.approx(cost))
    assert math.isnan(verdict.saved_s(100, 1.0)) == (cost is None)
    rows = dict(report.findings(job(), found, [verdict], 0))
    assert rows["one-off cost"].startswith(said)
    assert (cost is not None) or rows["one-off cost"].endswith("--rounds 2")
    plain = json.loads(json.dumps(result.summary(found, [verdict], {}), allow_nan=False))
    assert (plain["verdicts"][0]["setup_cost_s"] is None) == (cost is None)


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
    found = largest_difference([sample("stock", 1.0)], [sample("ours", 1.0, ours)])
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


def test_the_steps_under_the_profiler_are_in_no_block() -> None:
    plan = Plan(
        steps=40, folder="", workspace="", outside="", began=0.0, warmup_steps=10, is_profiled=True
    )
    assert plan.block_ends[-1] == 40 - UNTIMED_STEPS


def test_the_share_in_which_a_gpu_works_is_told_of_both() -> None:
    assert report._busy(samples([1.0], [0.5]), "ours") is None  # on a CPU
    found = [
        dataclasses.replace(measured, clock={"busy_share": share, "kernels_per_step": kernels})
        for measured, share, kernels in zip(
            samples([1.0], [0.5]), (0.31, 0.9), (710.0, 36.5), strict=True
        )
    ]
    said = str(report._busy(found, "ours"))
    assert "works in 31% of a step stock, of 710 kernels; works in 90% of a step" in said


@pytest.mark.parametrize("steps", [4, 5, 12, 60, 997])
def test_blocks_end_with_the_last_step(steps: int) -> None:
    plan = Plan(steps=steps, folder="", workspace="", outside="", began=0.0)
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


def job(**changes: Any) -> compare.Job:
    arguments = ("--nproc-per-node=1", "train.py", "--lr", "1")
    options = launcher.parse(arguments, command="run", default_processes="1")
    values: dict[str, Any] = {"world_size": 1, "steps": 30, "rounds": 2, "timeout_s": 1.0}
    values |= {"arms": ("stock", "deepytorch"), "default_processes": "1"}
    values |= {"arguments": arguments, "options": options}
    return compare.Job(**{**values, **changes})


def ran(arm: str, steps: int, wanted: int) -> Sample:
    losses = (1.0,) * min(steps, wanted)
    changes: dict[str, Any] = {"steps": min(steps, wanted), "is_complete": steps >= wanted}
    changes |= {"block_s": (1.0,) if arm == "stock" else (0.5,), "seams": ("transformers",)}
    return dataclasses.replace(sample(arm, 1.0, losses), **changes)


def test_a_script_that_ends_early_is_run_again_and_compared_over_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[tuple[str, int]] = []

    def run(asked: compare.Job, arm: compare.Arm, remarks: list[str]) -> Sample:
        order.append((arm.name, asked.steps))
        return ran(arm.name, 9, asked.steps)

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
    assert dict(rows)["or"] == "import deepytorch, at the top of the script"
    assert dict(rows)["time saved"].startswith("60.0 min of 2.0 h")


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
    def run(asked: compare.Job, arm: compare.Arm, remarks: list[str]) -> Sample:
        return ran(arm.name, counts[arm.name], asked.steps)

    monkeypatch.setattr(compare, "run_once", run)
    with pytest.raises(CompareError, match=message):
        compare.compare(job(), lambda line: None)


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ("train.py", "train.py"),
        ("{real}/train.py", "train.py"),
        ("{link}/train.py", "train.py"),
        ("{link}/src/train.py", "src/train.py"),
        ("../link/train.py", "train.py"),
        ("away/train.py", "away/train.py"),  # a link within the folder keeps its name
        ("{elsewhere}/train.py", "{elsewhere}/train.py"),
    ],
)
def test_a_script_of_this_folder_is_started_in_its_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, started: str
) -> None:
    places = {name: tmp_path / name for name in ("real", "link", "elsewhere")}
    (places["real"] / "src").mkdir(parents=True)
    places["elsewhere"].mkdir()
    places["link"].symlink_to("real")
    (places["real"] / "away").symlink_to(places["elsewhere"])
    monkeypatch.chdir(places["link"])
    arguments = ("--nproc-per-node=1", given.format(**places), "--lr", "1")
    options = launcher.parse(arguments, command="run", default_processes="1")
    found = compare._arguments(job(arguments=arguments, options=options))
    assert found == ["--nproc-per-node=1", started.format(**places), "--lr", "1"]


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
