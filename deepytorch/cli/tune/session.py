"""One `deepytorch tune`: explore, search, confirm, keep, show."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shlex
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch.cli import compare, console
from deepytorch.cli.tune import report
from deepytorch.cli.tune.candidates import Candidates
from deepytorch.cli.tune.outcome import Outcome
from deepytorch.cli.tune.progress import Progress
from deepytorch_core.base import config
from deepytorch_core.base.errors import AdapterError, TuneError
from deepytorch_core.base.file_permissions import why_not_believed
from deepytorch_core.c10d import adapter
from deepytorch_core.compare.result import Sample
from deepytorch_core.tune import space, stored
from deepytorch_core.tune.confirm import ROUNDS, confirm
from deepytorch_core.tune.knobs import DEFAULTS, Setting, in_words, layers_of
from deepytorch_core.tune.search import Search, TuningTrial

if TYPE_CHECKING:
    from deepytorch_core.testing.emulation import Network

_LEAST_STEPS = 4


def processes(options: Namespace) -> int:
    """How many processes torchrun will start. Raises ValueError where they can't be tuned."""
    count = compare.processes(options, what="deepytorch tune")
    if count < 2:
        raise ValueError("one process communicates with nobody: give --nproc-per-node")
    return count


def run(
    job: compare.Job, *, budget_steps: int, profile: Path | None, json_file: Path | None
) -> Outcome:
    """Tune a script, write the profile and show what came of it.

    Raises CompareError for a script that fails, and TuneError where nothing can be set or kept.
    """
    options = config.current()
    if profile is not None:
        config.set_current(dataclasses.replace(options, profile=str(profile)))
    path = _place()
    with contextlib.suppress(AdapterError):  # without it the script trains on stock collectives
        adapter.load()  # compiled once here, not within a trial
    candidates = Candidates(job, {"DEEPYTORCH_PROFILE": str(path)})
    with Progress(console.err(), budget_steps) as progress:
        outcome = _search(candidates, progress, budget_steps, max(1, len(job.ranks_per_node)))
    emulation = None if job.network is None else _emulation(job, job.network)
    wanted = stored.key(
        outcome.script,
        world_size=job.world_size,
        local_world_size=job.ranks_per_node[0] if job.ranks_per_node else job.world_size,
        emulated=emulation,
    )
    details = report.details(outcome, job.arguments)
    is_kept = stored.keep(wanted, outcome.tuned, details)
    files = [("profile", str(path))] if is_kept else []
    if json_file is not None:
        # Records are shown to others, whom it does not help to know where this machine's files are.
        place = {**wanted, "script": os.path.relpath(outcome.script)}
        report.write(json_file, {"for": place, **stored.entry(outcome.tuned), **details})
        files.append(("record", str(json_file)))
    command = shlex.join(["deepytorch", "run", *job.arguments])
    if profile is not None:
        command = f"DEEPYTORCH_PROFILE={shlex.quote(str(path))} {command}"
    files.append(("to run it", command))
    if emulation is not None:
        files[-1] = ("note", "measured on emulated nodes: no real job takes settings from it")
    elif options.tune != "auto":
        files.append(("note", f"runs with tune={options.tune}, as set here, leave it out"))
    report.show(outcome, files)
    if not is_kept:
        raise TuneError(f"the profile {path} was not written: give --profile FILE")
    return outcome


def _place() -> Path:
    """Return the profile's path. Raises TuneError, before any measurement, if it can't be kept."""
    path = config.profile_path()
    if path is None:
        raise TuneError("there is no place for the profile: give --profile FILE")
    if path.is_dir():
        raise TuneError(f"the profile {path} is a folder: give --profile FILE")
    reason = why_not_believed(path)
    if reason is not None:
        raise TuneError(f"the profile can't be kept: {reason}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.{os.getpid()}.tmp").touch()
        path.with_name(f"{path.name}.{os.getpid()}.tmp").unlink()
    except OSError as error:
        raise TuneError(
            f"the profile {path} can't be written ({error.strerror}): give --profile FILE"
        ) from error
    return path


def _search(
    candidates: Candidates, progress: Progress, budget_steps: int, num_nodes: int
) -> Outcome:
    numbers = (f"trial {number}" for number in itertools.count(1))
    progress.begins("the script with its defaults")
    first = candidates.explore(_LEAST_STEPS)
    if candidates.steps > budget_steps:
        raise TuneError(
            f"a budget of {budget_steps} steps is less than one trial of {candidates.steps}: "
            "raise --budget-steps"
        )
    if not first.script:
        raise TuneError(
            "no process group of the script goes through deepytorch, so no run of it would take "
            "what is found: does it call init_process_group, and is collectives=stock set?"
        )
    found = space.of(_job(first, num_nodes))
    for line in found.left_out:
        progress.say(f"left out: {line}")
    if not found.knobs:
        raise TuneError("nothing of this job can be set: the lines above say why")
    start = TuningTrial(setting=DEFAULTS, step_s=first.block_s, steps=candidates.steps)
    progress.ended("defaults", start, None)
    search = Search(
        found.knobs,
        progress.watched(lambda: next(numbers), candidates.measure),
        steps=candidates.steps,
        budget_steps=budget_steps,
    )
    search.start_from(start)
    search.run()
    progress.begins("the script with its defaults, again")
    again = candidates.repeat(DEFAULTS)
    progress.ended("again", again, again, counts=False)
    best = search.contender(again)
    repeated = None
    if best.setting != DEFAULTS:
        alone = search.best_of_one_layer() if len(layers_of(best.setting)) > 1 else None
        progress.say(_plan(best, alone))
        repeated = confirm(
            best.setting, _repeating(candidates, progress), None if alone is None else alone.setting
        )
    return Outcome(
        script=first.script or "",
        space=found,
        trials=tuple(search.trials),
        best=best,
        confirmation=repeated,
        sees_losses=candidates.sees_losses,
        remarks=tuple(dict.fromkeys(candidates.remarks)),
    )


def _emulation(job: compare.Job, network: Network) -> dict[str, Any]:
    """Return what is emulated, for the profile and records."""
    return {
        "nodes": network.num_nodes,
        "ranks_per_node": list(job.ranks_per_node),
        **network.to_dict(),
    }


def _plan(best: TuningTrial, alone: TuningTrial | None) -> str:
    """Say what follows the search, which no budget limits."""
    who = ["the defaults", in_words(best.setting)]
    if alone is not None:
        who.append(f"the best of one layer, {in_words(alone.setting)}")
    return f"repeating in {len(who) * ROUNDS} jobs, in turns: {'; '.join(who)}"


def _repeating(candidates: Candidates, progress: Progress) -> report.Repeat:
    runs: Counter[Setting] = Counter()

    def repeat(setting: Setting) -> TuningTrial:
        runs[setting] += 1
        name = f"round {runs[setting]}/{ROUNDS}"
        progress.begins(f"{name}: {in_words(setting)}")
        trial = candidates.repeat(setting)
        progress.ended(name, trial, trial, counts=False)
        return trial

    return repeat


def _job(sample: Sample, num_nodes: int) -> space.JobFacts:
    return space.JobFacts(
        device="cpu" if sample.device == "cpu" else "cuda",
        num_nodes=num_nodes,
        native_calls=sample.native_calls,
        asked=sample.asked,
        is_set=config.is_set,
    )
