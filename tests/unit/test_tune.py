"""`deepytorch tune` around its search: what can be set, what is kept, stored and put in force."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.distributed import HashStore
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch.cli import compare, console, launcher
from deepytorch.cli.tune import report, session
from deepytorch.cli.tune.candidates import Candidates
from deepytorch.cli.tune.progress import Progress
from deepytorch_core.base import config
from deepytorch_core.base.errors import CompareError, TuneError
from deepytorch_core.compare.result import Sample
from deepytorch_core.guard import profile
from deepytorch_core.tune import in_force, knobs, space, start, stored
from deepytorch_core.tune.confirm import confirm
from deepytorch_core.tune.knobs import DEFAULTS, Setting
from deepytorch_core.tune.search import TuningTrial


def setting(**values: int) -> Setting:
    return frozenset(values.items())


def trial(tried: Setting, seconds: float, problem: str = "") -> TuningTrial:
    return TuningTrial(setting=tried, step_s=(seconds,) * 6, steps=6, problem=problem)


def job(**changes: Any) -> space.JobFacts:
    facts: dict[str, Any] = {
        "device": "cpu",
        "num_nodes": 2,
        "native_calls": 10,
        "asked": {"ddp_bucket_mb": {"why_fixed": "", "enough": 100}},
        "is_set": lambda variable: False,
    }
    return space.JobFacts(**{**facts, **changes})


def test_the_space_has_what_the_job_can_set() -> None:
    found = space.of(job())
    names = [knob.name for knob in found.knobs]
    assert names == ["ddp_bucket_mb", "chunk_bytes", "num_sockets", "socket_bytes"]
    assert found.knobs[0].values == (4, 64, 256)  # 256 already means everything at once
    assert found.left_out == ()
    on_gpus = space.of(job(device="cuda", native_calls=0))
    assert {knob.name for knob in on_gpus.knobs} >= {"ddp_bucket_mb", "num_channels"}
    assert not {"chunk_bytes", "num_sockets"} & {knob.name for knob in on_gpus.knobs}


def test_a_layer_that_is_left_out_has_a_reason() -> None:
    assert space.of(job(asked={}, num_nodes=1)).left_out == (
        "framework: no sizes of the script's framework can be set: DDP's, FSDP2's and, through "
        "deepytorch's adapter, DeepSpeed's are",
        "transport: all ranks are on one node, so there are no sockets between them",
    )
    fixed = {"ddp_bucket_mb": {"why_fixed": "the script gives bucket_cap_mb", "enough": 100}}
    found = space.of(job(asked=fixed, is_set=lambda name: name == "DEEPYTORCH_NUM_SOCKETS"))
    assert [knob.name for knob in found.knobs] == ["chunk_bytes", "socket_bytes"]
    assert found.left_out == (
        "framework: ddp_bucket_mb is left alone: the script gives bucket_cap_mb",
        "transport: num_sockets is left alone: DEEPYTORCH_NUM_SOCKETS is set",
    )
    without = space.of(job(native_calls=0, asked={}))
    assert without.knobs == ()
    assert "plan: no collective was carried out by native code" in without.left_out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket": 4}, "unknown setting 'bucket'; known: ddp_bucket_mb"),
        ({"num_sockets": 100}, "num_sockets is 100: expected 1 to 64"),
        ({"chunk_bytes": 100}, "a multiple of 64"),
        ({"num_sockets": True}, "not a whole number"),
        ({"num_sockets": "4; rm"}, "not a whole number"),
        ([], "settings are list"),
        (None, "settings are NoneType"),
    ],
)
def test_settings_are_checked(settings: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        knobs.checked(settings)


def test_every_value_to_try_is_valid() -> None:
    for knob in knobs.KNOBS:
        for value in knob.values:
            assert knobs.checked({knob.name: value}) == setting(**{knob.name: value})
            half = value // 2
            if knob.is_graded and half >= knob.least:
                assert half % knob.step or knobs.checked({knob.name: half})


@pytest.fixture
def own_profile(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "profile.json"
    config.set_current(config.Options(profile=str(path)))
    yield path
    config.set_current(None)


def wanted(**changes: int) -> dict[str, Any]:
    sizes = {"world_size": 2, "local_world_size": 2, **changes}
    return stored.key("/home/train.py", **sizes)


def look_up(script: str = "/home/train.py", size: int = 2) -> stored.Tuned | None:
    return stored.look_up(script, world_size=size, local_world_size=size)


def test_an_outcome_is_kept_for_its_job_alone(own_profile: Path) -> None:
    assert look_up() is None
    tuned = stored.Tuned(setting(num_sockets=4), "faster", {"defaults": 2.0, "tuned": 1.0})
    assert stored.keep(wanted(), tuned, {"tried": [1, 2]})
    assert look_up() == tuned
    assert look_up(script="/home/other.py") is None
    assert look_up(size=4) is None
    (entry,) = profile.entries()
    assert entry["tried"] == [1, 2]
    assert entry["chosen"] == "num_sockets=4"
    # Emulated nodes are no real ones.
    config.set_current(config.Options(profile=str(own_profile.with_name("other.json"))))
    emulated = stored.key(
        "/home/train.py", world_size=2, local_world_size=2, emulated={"link_mbit": 1000.0}
    )
    assert stored.keep(emulated, tuned, {})
    assert look_up() is None


def test_defaults_are_kept_plainly(own_profile: Path) -> None:
    tuned = stored.Tuned(DEFAULTS, "nothing was faster than the defaults", {})
    assert stored.keep(wanted(), tuned, {})
    assert look_up() == tuned
    assert profile.entries()[0]["chosen"] == "defaults"


@pytest.mark.parametrize(
    "damage",
    [
        {"settings": {"num_sockets": -1}},
        {"settings": {"LD_PRELOAD": 1}},
        {"settings": None},
        {"times_ms": {"tuned": "fast"}},
    ],
)
def test_a_damaged_outcome_is_left_out_with_a_line(
    damage: dict[str, Any], own_profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored.keep(wanted(), stored.Tuned(setting(num_sockets=4), "faster", {}), {})
    document = json.loads(own_profile.read_text())
    document["decisions"][0].update(damage)
    own_profile.write_text(json.dumps(document))
    assert look_up() is None
    said = capsys.readouterr().err
    assert f"settings of deepytorch tune in {own_profile} are left out" in said


def test_another_users_profile_is_not_believed(
    own_profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored.keep(wanted(), stored.Tuned(setting(num_sockets=4), "faster", {}), {})
    own_profile.chmod(0o666)
    assert look_up() is None
    assert "can be written by others" in capsys.readouterr().err
    assert not stored.keep(wanted(), stored.Tuned(DEFAULTS, "", {}), {})


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    in_force.reset()


def test_what_the_user_set_stays(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPYTORCH_NUM_SOCKETS", "2")
    monkeypatch.setenv("DEEPYTORCH_CHUNK_BYTES", "")
    monkeypatch.delenv("DEEPYTORCH_CHUNK_BYTES")
    in_force.put_in_force(setting(num_sockets=8, chunk_bytes=16384, ddp_bucket_mb=4))
    environment = config.child_environment()
    assert environment["DEEPYTORCH_NUM_SOCKETS"] == "2"
    assert environment["DEEPYTORCH_CHUNK_BYTES"] == "16384"
    monkeypatch.delenv("DEEPYTORCH_CHUNK_BYTES")
    assert in_force.ask("ddp_bucket_mb") == 4
    assert in_force.ask("ddp_bucket_mb", why_fixed="the script gives it") is None
    assert in_force.ask("zero_reduce_bucket", enough=7) is None
    assert in_force.asked()["zero_reduce_bucket"] == in_force.Asked("", 7)
    in_force.reset()
    assert in_force.ask("ddp_bucket_mb") is None


def sample(steps: int, losses: tuple[float | None, ...]) -> Sample:
    return Sample(
        arm="",
        steps=steps,
        is_complete=True,
        block_s=(1.0,) * 6,
        setup_s=1.0,
        losses=losses,
        peak_bytes=None,
        device="cpu",
        redirected=(),
        made_folders=(),
        seams=(),
        native_calls=1,
        decisions=(),
    )


class Runs:
    """Stands in for `compare.run_once`; each call takes the next answer, or raises it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[Sample | Exception] = []
        self.watch: compare.Watch | None = None
        monkeypatch.setattr(compare, "run_once", self.run)
        command = launcher.parse(["t.py"], command="tune", default_processes="2")
        self.candidates = Candidates(
            compare.Job(
                arguments=("t.py",),
                options=command,
                default_processes="2",
                world_size=2,
                steps=9,
                rounds=1,
                arms=(),
                timeout_s=1.0,
            ),
            {},
        )

    def run(
        self, asked: compare.Job, arm: compare.Arm, remarks: list[str], watch: compare.Watch | None
    ) -> Sample:
        self.watch = watch
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def try_(self, answer: Sample | Exception, best: TuningTrial | None = None) -> TuningTrial:
        self.answers.append(answer)
        return self.candidates.measure(setting(num_sockets=4), best)


LOSSES = (2.0, 1.5, 1.0)


def test_a_candidate_must_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    runs.answers = [sample(9, LOSSES)]
    runs.candidates.explore(4)
    assert runs.candidates.sees_losses
    assert runs.try_(sample(9, (2.0, 1.5, 1.0 + 1e-4))).problem == ""
    assert runs.try_(sample(9, (2.0, 1.5, 1.01))).problem == (
        "another training: its loss is 0.01 off at step 3 (1.0% of it), where the defaults' runs "
        "are at most 0 apart"
    )
    assert runs.try_(sample(9, (2.0, math.nan, 1.0))).problem == (
        "another training: its loss is nan at step 2, where the defaults' is 1.5"
    )
    assert "no loss to compare at step 1" in runs.try_(sample(9, (None, None, None))).problem
    # Defaults that differ from themselves allow as much, three times.
    runs.answers = [sample(9, (2.0, 1.5, 1.005))]
    assert runs.candidates.measure(DEFAULTS, None).problem == ""
    assert runs.try_(sample(9, (2.0, 1.5, 1.01))).problem == ""
    assert runs.try_(sample(9, (2.0, 1.5, 1.03))).problem.startswith("another training")


def test_a_failure_is_one_line_and_its_output_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    output = (
        "the script failed with exit status 1 under the arm 'x':\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "t.py", line 3\n'
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory\n"
        "W1122 00:17:01.082000 9206 api.py:1028] Sending process 9213 closing signal SIGTERM\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    )
    found = runs.try_(CompareError(output))
    assert found.problem == "failed: torch.OutOfMemoryError: CUDA out of memory"
    assert found.output == output
    assert found.median_s == math.inf
    assert not found.beats(trial(DEFAULTS, 9.0))


def test_what_is_clearly_slower_is_ended_early(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    found = runs.try_(compare.StoppedEarly([2.0, 2.0]), trial(DEFAULTS, 1.0))
    assert (found.steps, found.is_whole) == (2, False)
    assert not found.beats(trial(DEFAULTS, 9.0))
    watch = runs.watch
    assert watch is not None
    assert not watch([9.0])  # one step says little
    assert not watch([9.0, 1.2])
    assert not watch([9.0] * 6)  # nothing is left to end
    assert watch([1.4, 9.0])


def test_a_short_script_is_tuned_over_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    short = dataclasses.replace(sample(7, LOSSES), is_complete=False)
    runs.answers = [short, sample(7, LOSSES)]
    runs.candidates.explore(4)
    assert runs.candidates.steps == 4
    problem = runs.try_(sample(8, LOSSES)).problem
    assert problem == "failed: it took 8 optimizer steps where the defaults took 7"
    runs = Runs(monkeypatch)
    runs.answers = [dataclasses.replace(short, steps=6)]
    with pytest.raises(CompareError, match="ended after 6 optimizer steps; at least 7"):
        runs.candidates.explore(4)


def test_progress_is_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, force_terminal=False, width=200), 100) as progress:
        best = trial(DEFAULTS, 0.01)
        progress.ended("defaults", best, None)
        progress.ended("trial 1", trial(setting(num_sockets=4), 0.008), best)
        progress.ended("trial 2", trial(setting(num_sockets=8), 0.02, "failed: x"), best)
    first, second, third = stream.getvalue().splitlines()
    assert first.split()[:6] == ["defaults", "defaults", "10.00", "ms", "a", "step"]
    assert "num_sockets=4" in second
    assert "-20.0%  best so far  (trial 2 of at most 17, " in second
    assert second.endswith(" left at this pace)")
    assert "failed: x  (trial 3 of at most 17, " in third


@pytest.mark.parametrize("no_color", [False, True])
def test_progress_is_one_picture_in_a_terminal(
    no_color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    screen = Console(file=stream, force_terminal=True, width=120, no_color=no_color)
    with Progress(screen, 100) as progress:
        progress.begins("num_sockets=4")
        best = trial(DEFAULTS, 0.01)
        progress.ended("defaults", best, None)
        progress.ended("trial 1", trial(setting(num_sockets=4), 0.008), best)
    shown = stream.getvalue()
    assert "best so far" in shown
    assert "12 of 100 steps" in shown
    assert ("\x1b[32m" in shown) is not no_color  # green


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script t.py where the test runs."""
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t.py"], "one process communicates with nobody"),
        (["--nnodes", "2", "t.py"], "deepytorch tune runs on one machine"),
        (["--link", "1gbit", "--nproc-per-node", "2", "t.py"], "give --nodes"),
        (["--nodes", "2", "--nproc-per-node", "2", "t.py"], "leave --nproc-per-node out"),
        (["--nodes", "2", "--ranks-per-node", "1,2,3", "t.py"], "does not fit --nodes 2"),
        (["--nproc-per-node", "2", "--no-python", "t.py"], "leaves no Python"),
    ],
)
def test_what_cant_be_tuned_is_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(cli.app, ["tune", *arguments])
    assert done.exit_code == 1
    assert message in str(done.exception)


@pytest.mark.usefixtures("script")
def test_a_place_that_cant_be_written_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "run_once", lambda *_: pytest.fail("a trial was run"))
    (tmp_path / "file").touch()
    (tmp_path / "open.json").touch()
    (tmp_path / "open.json").chmod(0o666)
    for place, message in (
        (tmp_path / "file" / "own.json", "can't be written"),
        (tmp_path, "is a folder: give --profile FILE"),
        (tmp_path / "open.json", "the profile can't be kept: .* can be written by others"),
    ):
        arguments = ["tune", "--nproc-per-node", "2", "--profile", str(place), "t.py"]
        done = CliRunner().invoke(cli.app, arguments)
        config.set_current(None)
        assert isinstance(done.exception, TuneError)
        assert re.search(message, str(done.exception))


def test_rank_0_answers_who_is_new_to_a_later_group(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(start, "_done", True)
    start.together(store, rank=0, size=2)
    monkeypatch.setattr(start, "_done", False)
    start.together(store, rank=1, size=2)  # would wait for a minute
    assert store.get("settings") == b"{}"
    assert in_force.current() == {}


def test_the_table_says_who_was_fastest_when_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joint, alone = setting(ddp_bucket_mb=4, num_sockets=4), setting(ddp_bucket_mb=4)
    searched = {DEFAULTS: 1.0, setting(num_sockets=4): 0.97, alone: 0.9, joint: 0.8}
    again = {**searched, joint: 0.95}
    trials = [trial(tried, seconds) for tried, seconds in searched.items()]
    outcome = session.Outcome(
        script="train.py",
        space=space.of(job()),
        trials=tuple(trials),
        best=trials[-1],
        confirmation=confirm(joint, lambda tried: trial(tried, again[tried]), alone),
        sees_losses=True,
        remarks=(),
    )
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", lambda: Console(file=screen, width=200))
    report.show(outcome, [])
    lines = screen.getvalue().splitlines()

    def row(start: str) -> str:
        return next(line for line in lines if line.startswith(start)).rstrip()

    assert row("defaults").endswith("repeated: 1000.00 ms")
    assert row("num_sockets=4").endswith("-3.0%")
    assert row("ddp_bucket_mb=4  ").endswith("best of one layer, repeated: 900.00 ms, fastest")
    assert row("ddp_bucket_mb=4, num").endswith("best, repeated: 950.00 ms")
    assert outcome.tuned.setting == alone
    reason = (
        "1.11x as fast as the defaults, faster in 3 of 3 rounds; ddp_bucket_mb=4, num_sockets=4"
    )
    assert outcome.tuned.reason == f"{reason} was not faster: 1.06x its time"
    assert outcome.tuned.times_ms == pytest.approx({"defaults": 1000.0, "tuned": 900.0})
    rounds = report.details(outcome, [])["rounds"]
    assert {name: len(jobs) for name, jobs in rounds.items()} == {
        "defaults": 3,
        "tuned": 3,
        "single_layer": 3,
    }
    assert rounds["single_layer"][0]["settings"] == {"ddp_bucket_mb": 4}
    plan = session._plan(trials[-1], trials[2])
    assert plan.startswith("repeating in 9 jobs, in turns: the defaults; ddp_bucket_mb=4, num")
    assert plan.endswith("; the best of one layer, ddp_bucket_mb=4")
    assert session._plan(trials[2], None).startswith("repeating in 6 jobs")
