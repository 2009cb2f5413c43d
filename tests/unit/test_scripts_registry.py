"""Test the rows of `deepytorch bench scripts`, and its records."""

from __future__ import annotations

import dataclasses
import json
import re
import string
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch.cli.bench_scripts import runs
from deepytorch.workloads import scripts
from deepytorch.workloads.scripts import SCRIPTS, images, text
from deepytorch.workloads.scripts.script import OUT, SIZES, Script, call
from deepytorch_core.base import provenance
from deepytorch_core.bench import training_tables
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.record import SCRIPT_FIELDS
from deepytorch_core.compare.result import STOCK, Sample
from deepytorch_core.compare.script_records import FIRST, SECOND, Origin, line, record_of, summary

PLACES = {"data", "out", "checkout"}
# They need nothing that the tests may lack to make their data.
LIGHT = (
    *("nanogpt", "mingpt-chargpt", "pytorch-word-language-model", "pytorch-mnist", "pygcn"),
    *("lightning-transformer", "timm-resnet50", "diffusers-unconditional"),
)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_every_script_is_complete(script: Script) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", script.repository)
    assert re.fullmatch(r"[0-9a-f]{40}", script.commit)
    assert script.path.endswith(".py")
    assert not script.path.startswith("/")
    assert script.goal >= 0.98
    texts = [*script.arguments, *script.small, script.folder, *script.variables.values()]
    for template in texts:
        assert not re.search(r"(^|=)/", template), f"{template} names a place of one machine"
        named = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        assert named <= PLACES


@pytest.mark.parametrize("size", SIZES)
def test_a_call_has_the_places_of_this_machine(size: str, tmp_path: Path) -> None:
    script = SCRIPTS["nanogpt"]
    called = call(script, size, tmp_path / "nanoGPT", tmp_path / "data")  # type: ignore[arg-type]
    assert called.script == tmp_path / "nanoGPT" / "train.py"
    assert called.folder == tmp_path / "nanoGPT"
    assert f"--dataset={tmp_path}/data" in called.arguments
    assert f"--out_dir={OUT}" in called.arguments
    of_minimal = call(SCRIPTS["mingpt-chargpt"], "small", tmp_path / "minGPT", tmp_path / "data")
    assert of_minimal.folder == tmp_path / "data"
    assert of_minimal.variables == {"PYTHONPATH": f"{tmp_path}/minGPT"}


@pytest.mark.parametrize("name", LIGHT)
def test_data_is_the_same_each_time(name: str, tmp_path: Path) -> None:
    if name in ("timm-resnet50", "diffusers-unconditional"):
        pytest.importorskip("PIL")
    written = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        SCRIPTS[name].prepare(folder, "small")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        written.append([(path.relative_to(folder), path.read_bytes()) for path in files])
    assert written[0]
    assert written[0] == written[1]


def test_rows_of_chat_are_ragged() -> None:
    lengths = text.lengths(2_000, 1024)
    assert 120 < sorted(lengths)[1_000] < 180
    assert max(lengths) == 1024
    assert [len(sentence.split()) for sentence in text.ragged(20, 1024)] == text.lengths(20, 1024)


def test_texts_share_their_words() -> None:
    some, others = set(text.words(20_000, 1)), set(text.words(20_000, 2))
    assert len(some & others) > 0.7 * len(some)
    assert text.words(100, 1) != text.words(100, 2)


def test_mnist_is_in_the_format_of_its_files(tmp_path: Path) -> None:
    images.mnist(tmp_path, "small")
    content = (tmp_path / "MNIST/raw/train-images-idx3-ubyte").read_bytes()
    assert content[:4] == b"\x00\x00\x08\x03"
    assert len(content) == 16 + 2_048 * 28 * 28


def test_an_unknown_script_is_named() -> None:
    with pytest.raises(BenchError, match="--only nano: expected nanogpt"):
        scripts.chosen(["nano"])
    assert [script.name for script in scripts.chosen([])] == list(SCRIPTS)


@pytest.mark.parametrize("given", ["", "1,2", "0", "1,x,2", "inf"])
def test_wrong_seconds_are_refused(given: str) -> None:
    with pytest.raises(BenchError, match="--seconds"):
        runs.parse_seconds(given)


def test_seconds_are_of_each_run() -> None:
    assert runs.parse_seconds("60,150,30") == (60.0, 150.0, 30.0, 150.0)
    assert runs.parse_seconds("60,150,30,20") == (60.0, 150.0, 30.0, 20.0)
    assert runs.parse_seconds("2") == (2.0, 2.0, 2.0, 2.0)


def test_missing_checkouts_are_named_with_how_to_get_them(tmp_path: Path) -> None:
    command = ["bench", "scripts", "--checkouts", str(tmp_path), "--only", "nanogpt"]
    done = CliRunner().invoke(cli.app, [*command, "--size", "small"])
    assert isinstance(done.exception, BenchError)
    assert "git clone https://github.com/karpathy/nanoGPT" in done.output
    assert f"git -C nanoGPT checkout {SCRIPTS['nanogpt'].commit}" in done.output


def test_a_scripts_path_comes_before_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "own")
    assert runs.beside_ours({"PYTHONPATH": "theirs"}) == {"PYTHONPATH": "theirs:own"}
    assert runs.beside_ours({"A": "b"}) == {"A": "b"}
    monkeypatch.delenv("PYTHONPATH")
    assert runs.beside_ours({"PYTHONPATH": "theirs"}) == {"PYTHONPATH": "theirs"}


def test_missing_packages_are_named(tmp_path: Path) -> None:
    script = Script(
        name="a",
        repository="someone/thing",
        commit="0" * 40,
        path="train.py",
        arguments=(),
        small=(),
        prepare=lambda folder, size: None,
        packages=("torch", "no_such_package"),
    )
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "train.py").write_text("")
    alone = "it trains on one rank alone: leave --nproc-per-node out"
    assert list(runs.left_out([script], tmp_path, ranks=2)) == [(script, alone)]
    assert list(runs.left_out([script], tmp_path)) == [(script, "not installed: no_such_package")]
    assert provenance.commit_of("train.py", tmp_path / "thing", is_top=True) == ""


def run(arm: str, step_s: Sequence[float], losses: Sequence[float], kept: int = 0) -> Sample:
    """Make up a run of a script that was clocked."""
    return Sample(
        arm=arm,
        steps=len(losses),
        is_complete=True,
        block_s=tuple(step_s),
        setup_s=1.0,
        losses=tuple(losses),
        peak_bytes=2**30,
        device="cpu",
        redirected=(),
        made_folders=(),
        seams=("plain",) if kept else (),
        native_calls=0,
        decisions=("  decision: x",) if kept else (),
        kept=kept,
        loss_ranks=1,
        draws=(0,) * len(losses),
        clock={
            **{"first_step_s": 3.0, "to_steady_s": 1.5, "steady_from": 4, "longest_s": 0.5},
            **{"busy_share": 0.25, "kernels_per_step": 100.0, "why_not": ""},
        },
    )


ORIGIN = Origin(
    script="a",
    repository="someone/thing",
    script_commit="0" * 40,
    arguments=("--data={data}",),
    size="full",
    goal=1.0,
)
LOSSES = [1.0 / step for step in range(1, 31)]


def test_a_record_has_every_field() -> None:
    samples = runs.common(
        [
            run(STOCK, [0.1, 0.2, 0.3], LOSSES),
            run(FIRST, [0.1], [*LOSSES, 7.0], kept=2),
            run(SECOND, [0.05], LOSSES, kept=2),
        ]
    )
    record = record_of(ORIGIN, samples, ["left"])
    assert tuple(record) == SCRIPT_FIELDS
    assert record["stock_ms"] == [150.0, 200.0, 250.0]
    assert record["speedup"] == 2.0
    assert record["speedup_spread"] == [1.5, 2.5]
    assert record["second_speedup"] == 4.0
    assert record["compared_steps"] == 30
    assert record["loss_check"] == "agree"
    assert record["loss_difference"] == 0.0
    assert record["wrong"] == 0
    assert record["ours_busy"] == 0.25
    assert record["ours_peak_gib"] == 1.0
    assert record["kept"] == 2
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert "2.00x (1.50-2.50), again 4.00x" in line(record)
    assert "GPU busy 25%, ours 25%" in line(record)
    assert "1 scripts: 2.00x of stock" in summary([record])


def test_differing_losses_claim_nothing() -> None:
    samples = [
        run(STOCK, [0.1], LOSSES),
        run(FIRST, [0.1], LOSSES),
        run(SECOND, [0.05], [2 * loss for loss in LOSSES]),
    ]
    record = record_of(ORIGIN, samples)
    assert record["wrong"] == 1
    assert "off at step 1" in record["loss_check"]
    assert "not claimed" in line(record)
    assert "no speed-up is claimed" in summary([record])


def test_steps_that_are_not_steady_are_told() -> None:
    samples = [run(arm, [0.1], LOSSES) for arm in (STOCK, FIRST, SECOND)]
    record = {**record_of(ORIGIN, samples), "second_steady_from": None, "second_to_steady_s": None}
    assert "not steady yet (raise --seconds)" in line(record)
    assert "steady after 1.5 s, again more than the run" in line(record)
    assert "no speed-up is claimed" in summary([record])
    assert "**1.00** (1.00-1.00), not steady: again |" in training_tables.scripts({"a": [record]})


def test_what_a_run_was_too_short_for_is_told() -> None:
    begun = {"what": "compile of Net", "is_begun": True, "after_steps": 900}
    waiting = {"what": "compile of Part", "is_begun": False, "after_steps": 900}
    stock, first, second = (run(arm, [0.1], LOSSES) for arm in (STOCK, FIRST, SECOND))
    second = dataclasses.replace(second, undecided=(begun, waiting))
    record = record_of(ORIGIN, [stock, first, second])
    assert record["remarks"] == [
        "deepytorch, again: compile of Net was still being tried at the end"
    ]
    assert "still being tried (raise --seconds)" in line(record)
    assert "**1.00** (1.00-1.00), still being tried |" in training_tables.scripts({"a": [record]})
