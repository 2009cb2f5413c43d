"""The report at the end of `deepytorch run --compare`."""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepytorch.cli import compare, console
from deepytorch_core.compare import receipt, result
from deepytorch_core.compare.result import FASTER, OTHERWISE, SLOWER, ArmVerdict, Sample


def headline(verdict: ArmVerdict) -> str:
    """The verdict in a sentence; a gain only of the same training, out of the noise."""
    if verdict.word == OTHERWISE:
        return f"{verdict.arm}: {verdict.word}, so no speed-up is claimed: {verdict.losses.apart}"
    ratio = f"{verdict.speedup:.3f}x ({verdict.spread[0]:.3f} to {verdict.spread[1]:.3f})"
    if verdict.word == FASTER:
        return f"{verdict.arm} is faster: {ratio}"
    if verdict.word == SLOWER:
        return f"{verdict.arm} is slower: {ratio}"
    return f"{verdict.arm}: {verdict.word} ({ratio})"


def findings(
    job: compare.Job, samples: Sequence[Sample], verdicts: Sequence[ArmVerdict], total_steps: int
) -> list[tuple[str, str]]:
    """(name, value) of all that is printed."""
    main, *others = verdicts
    stock = [sample for sample in samples if sample.arm == result.STOCK]
    stock_s = statistics.median(sample.step_s for sample in stock)
    ours_s = statistics.median(sample.step_s for sample in samples if sample.arm == main.arm)
    device = f"{job.world_size} process{'es' if job.world_size > 1 else ''}, {stock[0].device}"
    rows = [
        ("speed-up", headline(main)),
        ("step time", f"{stock_s * 1e3:.2f} ms stock, {ours_s * 1e3:.2f} ms {main.arm}"),
        ("noise", _noise(job, main)),
        ("runs", f"{job.rounds} of each arm in turns, {job.steps} optimizer steps each, {device}"),
        ("loss difference", _losses(main)),
        *([("random numbers", drawn)] if (drawn := _drawn(main)) else []),
        ("peak memory", _memory(main, stock)),
        *([("GPU", busy)] if (busy := _busy(samples, main.arm)) else []),
        ("time saved", _saved(main, stock_s, total_steps)),
        ("one-off cost", _one_off(main)),
    ]
    rows += [(verdict.arm, headline(verdict)) for verdict in others]
    ours = next(sample for sample in samples if sample.arm == main.arm)
    rows.append(("native collectives", f"{ours.native_calls}"))
    if not ours.seams:
        rows.append(
            (
                "compute",
                "unchanged: no model was met that an optimizer of torch's trains, or the runs "
                "were too short to try anything (DEEPYTORCH_PATIENCE=off tries at once)",
            )
        )
    rows += [("", line) for line in ours.decisions]
    rows += [("undecided", line) for line in undecided(ours)]
    kept, *other_ways = _keep(job, main, ours)
    rows += [("to keep", kept), *(("or", line) for line in other_ways)]
    return rows


def undecided(ours: Sample) -> list[str]:
    """Say what the steps were too few for: the times are not those of a whole training."""
    lines = []
    for trial in ours.undecided:
        # The timed steps follow a fifth of all. Most of them are to come after the decision.
        enough = -(-2 * trial["after_steps"] // 100) * 100
        if trial["is_begun"]:
            state = "was still being tried, in turns with eager steps, when the steps were over"
        else:
            state = "had not begun: a run must last long enough to earn it back"
        lines.append(
            f"{trial['what']} {state}, so the step times don't show what it gives: "
            f"--steps {enough} do, DEEPYTORCH_COMPILE=off leaves it out"
        )
    return lines


def _noise(job: compare.Job, verdict: ArmVerdict) -> str:
    if job.rounds < 2:
        return "not known from one run of each arm: no difference can be claimed"
    return f"{verdict.noise:.1%} between equal runs; less is no difference"


def _one_off(verdict: ArmVerdict) -> str:
    if verdict.setup_cost_s is None:
        return "not known from one run of each arm, as the first fills caches: take --rounds 2"
    return f"{verdict.setup_cost_s:+.1f} s until the warm-up is over"


def _losses(verdict: ArmVerdict) -> str:
    found = verdict.losses
    if found.difference is None:
        return "no loss was seen: the script calls backward on no single number"
    text = f"at most {found.difference:.3g} ({found.relative:.2g} of it)"
    if found.own is not None:
        text += f"; stock from run to run: {found.own:.3g}"
    if found.nudged is not None:
        others = " and other random numbers" if found.drawn_from is not None else ""
        text += f"; stock with weights moved by rounding{others}: {found.nudged:.3g}"
    return text


def _drawn(verdict: ArmVerdict) -> str | None:
    """Say if random numbers are others than stock's: those of dropout, of noise."""
    found = verdict.losses
    if found.drawn_from is None:
        return None
    text = f"others than stock's from step {found.drawn_from} on, so dropout and noise differ"
    if found.nudged is not None:
        return f"{text}; with others stock's losses differ by {found.nudged:.3g}, too"
    return f"{text}; losses differ by {found.difference or 0.0:.3g} at most"


def _memory(verdict: ArmVerdict, stock: Sequence[Sample]) -> str:
    known = [sample.peak_bytes for sample in stock if sample.peak_bytes is not None]
    if not known or verdict.peak_bytes is None:
        return "not known here"
    kind = "of the process" if stock[0].device == "cpu" else "allocated on the GPU"
    return f"{_gib(max(known))} stock, {_gib(verdict.peak_bytes)} {verdict.arm}, {kind}"


def _busy(samples: Sequence[Sample], arm: str) -> str | None:
    """How much of a step the GPU works; None where the runs were not profiled on one."""
    said = []
    for name in (result.STOCK, arm):
        clocks = [
            sample.clock for sample in samples if sample.arm == name and sample.clock is not None
        ]
        known = [clock for clock in clocks if clock["busy_share"] is not None]
        if not known:
            return None
        share = statistics.median(clock["busy_share"] for clock in known)
        kernels = statistics.median(clock["kernels_per_step"] for clock in known)
        said.append(f"works in {share:.0%} of a step {name}, of {kernels:.0f} kernels")
    return f"{'; '.join(said)}; else it waits for launches, for data or for other ranks"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _saved(verdict: ArmVerdict, stock_s: float, total_steps: int) -> str:
    if verdict.word == OTHERWISE:
        return f"none: {OTHERWISE}"
    if verdict.word != FASTER:
        return "none that stands out of the noise"
    if total_steps:
        saved, whole = verdict.saved_s(total_steps, stock_s), total_steps * stock_s
        return f"{_time(saved)} of {_time(whole)} ({total_steps} steps), one-off cost included"
    minutes = 60 * (1 - 1 / verdict.speedup)
    return f"{minutes:.1f} minutes of each hour (--total-steps N: on the whole run)"


def _time(seconds: float) -> str:
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if abs(minutes) < 120 else f"{minutes / 60:.1f} h"


def _keep(job: compare.Job, verdict: ArmVerdict, ours: Sample) -> list[str]:
    """Say what the user writes to have what was measured."""
    if verdict.word == OTHERWISE:
        return [
            f"nothing: {OTHERWISE}; --split tells which part does it, and please report it with "
            "the receipt"
        ]
    if verdict.word != FASTER:
        if ours.undecided:
            return ["nothing that these steps show: see undecided"]
        return ["nothing: train as before"]
    return [
        shlex.join(["deepytorch", "run", *job.arguments]),
        "import deepytorch, at the top of the script",
    ]


def show(
    job: compare.Job,
    samples: Sequence[Sample],
    remarks: Sequence[str],
    *,
    total_steps: int,
    html: Path,
    json_file: Path | None,
) -> None:
    """Print the findings and write the receipt, and the record if asked for."""
    from deepytorch_core.base import provenance

    job = dataclasses.replace(job, steps=samples[0].steps)  # fewer where the script ends early
    verdicts = [result.judge(samples, arm) for arm in job.arms[1:]]
    rows = findings(job, samples, verdicts, total_steps)
    rows += [("note", remark) for remark in remarks]
    origin: dict[str, Any] = provenance.provenance()
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    machine = [("machine", origin["machine"]["name"]), ("versions", versions)]
    command = shlex.join(["deepytorch", "run", "--compare", *job.arguments])
    # First of all, as a file may not be writable any more.
    console.out().print(console.fields("\nstock and deepytorch", [*rows, ("receipt", str(html))]))
    receipt.write(
        html, samples, command=command, headline=headline(verdicts[0]), rows=[*rows, *machine]
    )
    if json_file is not None:
        facts = {
            "bench": "run_compare",
            "command": command,
            "steps": job.steps,
            "rounds": job.rounds,
            "world_size": job.world_size,
            **origin,
        }
        found = result.summary(samples, verdicts, facts)
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
