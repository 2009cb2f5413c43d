"""Run one row of `deepytorch bench scripts`: stock and ours in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepytorch.cli import compare, launcher
from deepytorch.workloads.scripts.script import Script, ScriptCall, Size, call
from deepytorch_core.base import config, provenance
from deepytorch_core.base.errors import CompareError
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.matrix_rate import matrix_rate
from deepytorch_core.compare.plan import MIN_STEPS, UNTIMED_STEPS
from deepytorch_core.compare.result import NUDGED, STOCK, Sample
from deepytorch_core.compare.script_records import FIRST, SECOND

MOST_STEPS = 1_000_000
"""A run takes no more steps; its time ends it long before."""
PEER = "peer"
"""The arm of `Script.peer`."""
COMPARED_STEPS = 400
"""Losses are compared over so many steps at most."""
_LEAST_STEPS = MIN_STEPS + UNTIMED_STEPS


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits runs to `seconds` since the first step: stock's, ours, ours again, the peer's.

    `rounds` are further pairs of stock and ours again; a run is ended after `timeout_s` in all.
    """

    seconds: tuple[float, float, float, float] = (60.0, 150.0, 60.0, 150.0)
    rounds: int = 0
    timeout_s: float = 1200.0


@dataclass(frozen=True)
class ScriptRow:
    """Holds a script, the samples of its runs in their order, and remarks about them.

    `peer` is the run of the script's peer, and `matrix_rate` operations per second of products.
    """

    script: Script
    size: Size
    commit: str
    samples: tuple[Sample, ...]
    remarks: tuple[str, ...]
    peer: Sample | None = None
    matrix_rate: float | None = None


def parse_seconds(text: str) -> tuple[float, float, float, float]:
    """Read STOCK,FIRST,SECOND[,PEER] or one number for all; a peer may compile, as our first does.

    Raises BenchError for what is neither.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) not in (1, 3, 4) or not all(0 < seconds < math.inf for seconds in found):
        raise BenchError(
            f"--seconds {text}: expected seconds of stock's run, of our first and of our second, "
            "such as 60,150,60, a peer's as the fourth if it is to differ from our first, or one "
            "number for all"
        )
    stock, first, second, *peer = found if len(found) > 1 else found * 3
    return stock, first, second, peer[0] if peer else first


def measure(
    script: Script,
    size: Size,
    checkout: Path,
    scratch: Path,
    *,
    limits: Limits,
    show: compare.Say,
    ranks: int = 1,
) -> ScriptRow:
    """Run a script stock, with ours from nothing, and with what ours has kept.

    Args:
        script: the row.
        size: whether model and data are small.
        checkout: the script's repository.
        scratch: an empty folder for data, caches and the profile.
        limits: how long the runs last.
        show: told of each run.
        ranks: of each run; a run of one is no job of torchrun.

    Raises CompareError for a run that failed, took too long or took too few steps.
    """
    data = scratch / "data"
    data.mkdir(parents=True)
    show(f"{script.name}: making its data")
    script.prepare(data, size)
    called = call(script, size, checkout, data)
    job = _job(called, limits, ranks)
    remarks: list[str] = []
    samples: list[Sample] = []

    def run(job: compare.Job, arm: compare.Arm) -> Sample:
        with contextlib.chdir(called.folder):
            sample = compare.run_once(job, arm, remarks)
        if sample.steps < _LEAST_STEPS:
            raise CompareError(compare.too_short(sample.steps, _LEAST_STEPS))
        show(f"{script.name}: {arm.name} took {sample.steps} steps, {sample.step_s * 1e3:.2f} ms")
        # The profile's place goes with the run.
        told = tuple(line.replace(f"{scratch}{os.sep}", "") for line in sample.decisions)
        return dataclasses.replace(sample, decisions=told)

    arms = _arms(scratch, size, called.variables, limits)
    rate = None if script.work is None else matrix_rate()
    samples.append(run(job, arms[STOCK]))
    peer = None
    if script.peer is not None and size == "full":
        theirs = _job(call(script, size, checkout, data, script.peer.arguments), limits, ranks)
        try:
            arm = dataclasses.replace(arms[STOCK], name=PEER, seconds=limits.seconds[3])
            peer = run(theirs, arm)
        except CompareError as error:  # ours is measured all the same
            remarks.append(f"{script.peer.name}: {error}")
    samples += [run(job, arms[name]) for name in (FIRST, SECOND, *(STOCK, SECOND) * limits.rounds)]
    samples = common(samples)
    nudged = compare.nudged_arm((FIRST, SECOND), samples)
    if nudged is not None:
        show(f"{script.name}: stock once more, with weights moved by rounding, as a yardstick")
        arm = dataclasses.replace(
            arms[STOCK], name=NUDGED, is_nudged=True, is_redrawn=nudged.is_redrawn, seconds=None
        )
        job = dataclasses.replace(job, steps=samples[0].steps)
        try:
            with contextlib.chdir(called.folder):
                samples.append(compare.run_once(job, arm, remarks))
        except CompareError as error:
            remarks.append(f"{NUDGED}: {error}")
    commit = provenance.commit_of(script.path, checkout, is_top=True)
    # The scratch folder goes, with all that a script makes there.
    left = tuple(remark for remark in dict.fromkeys(remarks) if str(scratch) not in remark)
    return ScriptRow(script, size, commit, tuple(samples), left, peer, rate)


def common(samples: Sequence[Sample]) -> list[Sample]:
    """Cut the losses of runs down to the steps that all of them took."""
    steps = min(COMPARED_STEPS, *(sample.steps for sample in samples))
    return [
        dataclasses.replace(
            sample,
            steps=steps,
            losses=sample.losses[:steps],
            draws=sample.draws[:steps],
            is_complete=True,
        )
        for sample in samples
    ]


def left_out(
    scripts: Sequence[Script], checkouts: Path, ranks: int = 1
) -> Iterator[tuple[Script, str]]:
    """Yield the scripts that can't run, each with how to mend that."""
    for script in scripts:
        place = checkouts / script.checkout
        if ranks > 1 and not script.is_distributed:
            yield script, "it trains on one rank alone: leave --nproc-per-node out"
        elif not (place / script.path).is_file():
            yield script, f"{place / script.path} is missing: {script.how_to_get()}"
        elif missing := script.missing():
            yield script, f"not installed: {', '.join(missing)}"


def _job(called: ScriptCall, limits: Limits, ranks: int) -> compare.Job:
    arguments = (str(called.script), *called.arguments)
    return compare.Job(
        arguments=arguments,
        options=launcher.parse(
            arguments, command="deepytorch bench scripts", default_processes=str(ranks)
        ),
        default_processes=str(ranks),
        world_size=ranks,
        steps=MOST_STEPS,
        rounds=1,
        arms=(),
        timeout_s=limits.timeout_s,
    )


def _arms(
    scratch: Path, size: Size, variables: Mapping[str, str], limits: Limits
) -> dict[str, compare.Arm]:
    both = {**_quiet(scratch, size), **beside_ours(variables)}
    names: dict[str, tuple[str, float]] = {
        STOCK: (STOCK, limits.seconds[0]),
        FIRST: (compare.OURS, limits.seconds[1]),
        SECOND: (compare.OURS, limits.seconds[2]),
    }
    return {
        name: dataclasses.replace(
            compare.ARMS[like],
            name=name,
            variables={**both, **_caches(scratch / like), **compare.ARMS[like].variables},
            seconds=seconds,
            is_clocked=True,
        )
        for name, (like, seconds) in names.items()
    }


def beside_ours(variables: Mapping[str, str]) -> dict[str, str]:
    """Put this process's own PYTHONPATH behind that of a script."""
    name = "PYTHONPATH"
    own = config.child_environment().get(name)
    if own and name in variables:
        return {**variables, name: os.pathsep.join((variables[name], own))}
    return dict(variables)


def _caches(folder: Path) -> dict[str, str]:
    """Give runs caches in which they find nothing but their own."""
    return {
        "DEEPYTORCH_PROFILE": str(folder / "profile.json"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def _quiet(scratch: Path, size: Size) -> dict[str, str]:
    """Keep runs from looking things up in a network, and small ones on the CPU."""
    return {
        "HF_HOME": str(scratch / "data"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"CUDA_VISIBLE_DEVICES": ""} if size == "small" else {}),
    }
