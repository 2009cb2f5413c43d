"""`deepytorch tune`: the search on synthetic jobs, what is kept, stored and put in force."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.distributed import HashStore
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch.cli import compare, launcher
from deepytorch.cli.tune.candidates import Candidates
from deepytorch.cli.tune.progress import Progress
from deepytorch_core import config
from deepytorch_core.compare.result import Sample
from deepytorch_core.errors import CompareError, TuneError
from deepytorch_core.guard import profile
from deepytorch_core.tune import confirm, in_force, knobs, space, start, stored
from deepytorch_core.tune.knobs import DEFAULTS, Knob, Setting
from deepytorch_core.tune.search import Search, Trial

STEPS = 6
KNOBS = (
    Knob(name="ddp_bucket_mb", layer=knobs.FRAMEWORK, values=(4, 64), least=1, most=1024),
    Knob(name="chunk_bytes", layer=knobs.PLAN, values=(16384, 65536), least=64, most=1 << 18),
    Knob(name="num_sockets", layer=knobs.TRANSPORT, values=(4, 8), least=1, most=64),
)
Seconds = Callable[[Mapping[str, int]], float]


class Machine:
    """Jobs whose step takes `seconds`, and up to `noise` of it more or less."""

    def __init__(self, seconds: Seconds, *, noise: float = 0.0, seed: int = 0) -> None:
        self.seconds = seconds
        self.noise = noise
        self.random = random.Random(seed)
        self.steps = 0
        self.problems: dict[Setting, str] = {}

    def measure(self, setting: Setting, best: Trial | None) -> Trial:
        middle = self.seconds(dict(setting))
        spread = [1 + self.noise * self.random.uniform(-1, 1) for _ in range(STEPS)]
        self.steps += STEPS
        return Trial(
            setting=setting,
            step_s=tuple(middle * factor for factor in spread),
            steps=STEPS,
            problem=self.problems.get(setting, ""),
        )

    def search(self, budget_steps: int) -> Search:
        found = Search(KNOBS, self.measure, steps=STEPS, budget_steps=budget_steps)
        found.run()
        assert self.steps <= budget_steps
        return found


def setting(**values: int) -> Setting:
    return frozenset(values.items())


def pays_beside_another(values: Mapping[str, int]) -> float:
    """Small buckets cost latency, unless several sockets hide it: one pass misses the best."""
    has_sockets, is_small = values.get("num_sockets") == 4, values.get("ddp_bucket_mb") == 4
    return {(False, False): 1.0, (False, True): 1.2, (True, False): 0.9, (True, True): 0.6}[
        has_sockets, is_small
    ]


def pays_only_together(values: Mapping[str, int]) -> float:
    """Neither pays alone, so no change of one setting leads to the best."""
    has_sockets, is_small = values.get("num_sockets") == 4, values.get("ddp_bucket_mb") == 4
    penalty = 0.02 * (values.get("chunk_bytes") is not None)
    if has_sockets and is_small:
        return 0.6 + penalty
    return 1.0 + 0.05 * has_sockets + 0.05 * is_small + penalty


@pytest.mark.parametrize("seconds", [pays_beside_another, pays_only_together])
@pytest.mark.parametrize("seed", range(20))
def test_an_interaction_is_found_in_noise(seconds: Seconds, seed: int) -> None:
    machine = Machine(seconds, noise=0.03, seed=seed)
    best = machine.search(budget_steps=27 * STEPS).best
    assert best is not None
    assert best.setting >= setting(ddp_bucket_mb=4, num_sockets=4)


def test_one_pass_over_the_settings_misses_it() -> None:
    """What the search is better than."""
    machine = Machine(pays_beside_another)
    search = machine.search(budget_steps=7 * STEPS)
    assert search.best is not None
    assert search.best.setting == setting(num_sockets=4)


@pytest.mark.parametrize("least_at", [1, 2, 8, 16, 32])
def test_a_degree_is_refined_from_the_value_that_was_found(least_at: int) -> None:
    """Neither 4 nor 64 is best, but one of them is better than the default."""
    graded = dataclasses.replace(KNOBS[0], is_graded=True)

    def seconds(values: Mapping[str, int]) -> float:
        return 1 + abs(
            math.log2(values.get("ddp_bucket_mb", 25) * 1000) - math.log2(1000 * least_at)
        )

    machine = Machine(lambda values: 10.0 if not values else seconds(values))
    search = Search((graded,), machine.measure, steps=STEPS, budget_steps=1000)
    assert search.run().setting == setting(ddp_bucket_mb=least_at)
    tried = {dict(trial.setting).get("ddp_bucket_mb", 0) for trial in search.trials}
    assert max(tried) == 64
    assert len(tried) <= 1 + 2 + 5


@pytest.mark.parametrize("budget", [1, 5, 6, 11, 12, 100, 161])
def test_the_budget_is_kept(budget: int) -> None:
    machine = Machine(lambda values: 1.0, noise=0.2)
    search = Search(KNOBS, machine.measure, steps=STEPS, budget_steps=budget)
    search.run()
    assert machine.steps <= max(budget, STEPS)
    assert len({trial.setting for trial in search.trials}) == len(search.trials)


def test_steps_saved_by_an_early_end_are_spent_on_others() -> None:
    def measure(one: Setting, best: Trial | None) -> Trial:
        is_slow = bool(one)
        steps = 2 if is_slow else STEPS
        return Trial(
            setting=one, step_s=(1.0 + is_slow,) * steps, steps=steps, is_whole=not is_slow
        )

    search = Search(KNOBS, measure, steps=STEPS, budget_steps=3 * STEPS)
    search.run()
    assert len(search.trials) == 1 + 4  # 6 + 4 * 2, and less than 6 are left
    assert search.best is search.trials[0]


def test_a_lucky_first_run_of_the_defaults_hides_nothing() -> None:
    machine = Machine(lambda values: 0.95 if "num_sockets" in values else 1.0)
    search = Search(KNOBS, machine.measure, steps=STEPS, budget_steps=8 * STEPS)
    search.start_from(trial(DEFAULTS, 0.9))
    assert search.run().setting == DEFAULTS
    assert search.contender(trial(DEFAULTS, 0.9)).setting == DEFAULTS
    assert search.contender(trial(DEFAULTS, 1.1)).setting == setting(num_sockets=4)
    # One that failed or was ended early is none.
    slow = Machine(lambda values: 1.0)
    slow.problems = {setting(num_sockets=4): "failed"}
    search = slow.search(budget_steps=8 * STEPS)
    assert search.contender(trial(DEFAULTS, 1.0)).setting == DEFAULTS


def test_a_search_ends_when_nothing_is_left() -> None:
    search = Machine(lambda values: 1.0).search(budget_steps=10_000)
    alone, pairs = 3 * 2, 3 * 2 * 2
    assert len(search.trials) == 1 + alone + pairs


def test_what_fails_is_no_winner_and_is_not_combined() -> None:
    machine = Machine(lambda values: 1.0 - 0.2 * len(values))
    for one in (4, 64):
        machine.problems[setting(ddp_bucket_mb=one)] = "failed: out of memory"
    search = machine.search(budget_steps=10_000)
    assert search.best is not None
    assert search.best.setting == setting(chunk_bytes=16384, num_sockets=4)
    failed = [trial for trial in search.trials if trial.problem]
    assert {trial.setting for trial in failed} == set(machine.problems)
    assert all(trial.median_s == math.inf for trial in failed)


@pytest.mark.parametrize("seed", range(40))
def test_a_winner_that_is_slower_is_never_kept(seed: int) -> None:
    """Every setting is slower than the defaults by 1 to 10%; noise of 10% hides it."""
    chosen = random.Random(seed)
    slowdown: dict[frozenset[tuple[str, int]], float] = {}

    def seconds(values: Mapping[str, int]) -> float:
        if not values:
            return 1.0
        return slowdown.setdefault(frozenset(values.items()), 1 + chosen.uniform(0.01, 0.1))

    machine = Machine(seconds, noise=0.1, seed=seed)
    best = Search(KNOBS, machine.measure, steps=STEPS, budget_steps=100).run()
    repeated = confirm.confirm(best.setting, lambda one: machine.measure(one, None))
    if best.setting != DEFAULTS:
        assert not repeated.is_kept
        assert "did not repeat" in repeated.reason


def trial(one: Setting, seconds: float, problem: str = "") -> Trial:
    return Trial(setting=one, step_s=(seconds,) * STEPS, steps=STEPS, problem=problem)


@pytest.mark.parametrize(
    ("defaults", "winner", "is_kept"),
    [
        ((1.0, 1.0, 1.0), (0.9, 0.9, 0.9), True),
        ((1.0, 1.0, 1.0), (0.9, 0.9, 1.2), True),  # two of three
        ((1.0, 1.0, 1.0), (0.5, 1.1, 1.1), False),  # one of three
        ((1.0, 1.0, 1.0), (0.98, 0.98, 0.98), False),  # too little
        ((1.0, 2.0, 1.0), (1.0, 1.0, 1.0), False),  # an outlier is no gain
    ],
)
def test_a_winner_stays_if_it_repeats(
    defaults: tuple[float, ...], winner: tuple[float, ...], is_kept: bool
) -> None:
    wanted = setting(num_sockets=4)
    times = {DEFAULTS: iter(defaults), wanted: iter(winner)}
    order: list[Setting] = []

    def measure(one: Setting) -> Trial:
        order.append(one)
        return trial(one, next(times[one]))

    found = confirm.confirm(wanted, measure)
    assert found.is_kept is is_kept
    assert order == [DEFAULTS, wanted, wanted, DEFAULTS, DEFAULTS, wanted]
    assert len(found.defaults) == len(found.winner) == 3


def test_a_winner_that_fails_when_repeated_is_named() -> None:
    wanted = setting(num_sockets=4)
    trials = iter([trial(DEFAULTS, 1.0), trial(wanted, 0.5), trial(wanted, 0.5, "another loss: x")])
    found = confirm.confirm(wanted, lambda one: next(trials))
    assert not found.is_kept
    assert found.reason == "it failed when repeated: another loss: x"
    assert found.times_ms == {"defaults": 1000.0, "tuned": 500.0}


def job(**changes: Any) -> space.Job:
    facts: dict[str, Any] = {
        "device": "cpu",
        "num_nodes": 2,
        "native_calls": 10,
        "asked": {"ddp_bucket_mb": {"why_fixed": "", "enough": 100}},
        "is_set": lambda variable: False,
    }
    return space.Job(**{**facts, **changes})


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
        self, one: compare.Job, arm: compare.Arm, remarks: list[str], watch: compare.Watch | None
    ) -> Sample:
        self.watch = watch
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def try_(self, answer: Sample | Exception, best: Trial | None = None) -> Trial:
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
        "another loss: it differs by 0.0099 of itself"
    )
    assert runs.try_(sample(9, (2.0, math.nan, 1.0))).problem.startswith("another loss")
    assert runs.try_(sample(9, (None, None, None))).problem == "another loss: none was seen"
    # Defaults that differ from themselves allow as much, three times.
    runs.answers = [sample(9, (2.0, 1.5, 1.005))]
    assert runs.candidates.measure(DEFAULTS, None).problem == ""
    assert runs.try_(sample(9, (2.0, 1.5, 1.01))).problem == ""
    assert runs.try_(sample(9, (2.0, 1.5, 1.03))).problem.startswith("another loss")


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
    assert first.split() == ["defaults", "defaults", "10.00", "ms", "a", "step"]
    assert "num_sockets=4" in second
    assert second.endswith("-20.0%  best so far")
    assert third.endswith("failed: x")


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
