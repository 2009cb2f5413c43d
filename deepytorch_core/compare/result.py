"""Tells what the runs of a script say when they are put side by side."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepytorch_core.base.errors import CompareError
from deepytorch_core.compare.losses import LossAgreement, agreement
from deepytorch_core.guard.timing import LEAST_GAIN

STOCK = "stock"
NUDGED = "stock, nudged"
"""One more run of stock, which says what rounding and other random numbers do: see `nudge`."""

FASTER, SLOWER, SAME = "faster", "slower", "no difference beyond the noise"
NOT_OURS = "no difference that it has a part in"
OTHERWISE = "not the same training"

# Replicas are equal bit for bit; what tells them is a sum, whose order is the machine's.
_ALIKE = 1e-9


@dataclass(frozen=True)
class Sample:
    """One run of the script under one arm, its ranks put together.

    Times are the slowest rank's, in seconds: of a step, a mean per block, and until the warm-up is
    over. Losses are means over the ranks, None where no rank had one to see; `loss_ranks` had one.
    `draws` tell at each step how far rank 0's random generators were. `is_replicated` says whether
    all ranks ended with the same weights; None where that is not known, or there is one rank.
    `kept` are so many decisions for something else than stock. `script` is its path as
    `tune.stored` knows it, `asked` what `tune.in_force` was asked for; None and empty where no
    group of ours was made. `undecided` are the trials that the steps were too few for: "what" they
    decide, whether they "is_begun", and "after_steps", how many are enough. `clock` is what
    rank 0's `clock.StepClock` recorded, where the plan asked for it; if that was for every step,
    `block_s` are steady steps.
    """

    arm: str
    steps: int
    is_complete: bool
    block_s: tuple[float, ...]
    setup_s: float
    losses: tuple[float | None, ...]
    peak_bytes: int | None
    device: str
    redirected: tuple[str, ...]
    made_folders: tuple[str, ...]
    seams: tuple[str, ...]
    native_calls: int
    decisions: tuple[str, ...]
    kept: int = 0
    script: str | None = None
    asked: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    undecided: tuple[Mapping[str, Any], ...] = ()
    loss_ranks: int = 0
    draws: tuple[int, ...] = ()
    is_replicated: bool | None = None
    clock: Mapping[str, Any] | None = None

    @property
    def step_s(self) -> float:
        """The median over the blocks."""
        return statistics.median(self.block_s)


def read(arm: str, folder: Path, world_size: int) -> Sample:
    """Read what a run's ranks left in `folder`, over the steps that all of them took.

    Raises CompareError when a rank left nothing, and when only some of them took steps.
    """
    ranks: list[dict[str, Any]] = []
    for rank in range(world_size):
        file = folder / f"rank{rank}.json"
        if not file.exists():
            raise CompareError(
                f"{arm}: rank {rank} of {world_size} left without a word: its process ended before "
                "it had taken its steps and without Python's exit, such as by os._exit. Give fewer "
                "--steps than the script takes"
            )
        ranks.append(json.loads(file.read_text(encoding="utf-8")))
    steps = [found["steps"] for found in ranks]
    if any(steps) and not all(steps):
        idle = [rank for rank, count in enumerate(steps) if count == 0]
        raise CompareError(no_steps(arm, idle, world_size))
    peaks = [found["peak_bytes"] for found in ranks if found["peak_bytes"] is not None]
    redirected = {path for found in ranks for path in found["redirected"]}
    return Sample(
        arm=arm,
        steps=min(steps),
        is_complete=all(found["is_complete"] for found in ranks),
        block_s=tuple(map(max, zip(*(found["block_s"] for found in ranks), strict=False))),
        setup_s=max(found["setup_s"] for found in ranks),
        losses=tuple(map(_mean, zip(*(found["losses"] for found in ranks), strict=False))),
        peak_bytes=max(peaks, default=None),
        device=ranks[0]["device"],
        redirected=tuple(sorted(redirected)),
        made_folders=tuple(sorted({path for found in ranks for path in found["made_folders"]})),
        seams=tuple(ranks[0]["seams"]),
        native_calls=sum(found["report"]["native_calls"] for found in ranks),
        decisions=tuple(ranks[0]["report"]["decisions"]),
        kept=ranks[0]["report"]["kept"],
        script=ranks[0]["script"],
        asked=ranks[0]["asked"],
        undecided=tuple(ranks[0]["undecided"]),
        loss_ranks=sum(any(loss is not None for loss in found["losses"]) for found in ranks),
        draws=tuple(ranks[0]["draws"]),
        is_replicated=_are_alike([found["weights"] for found in ranks]),
        clock=ranks[0].get("clock"),
    )


def _are_alike(weights: Sequence[float | None]) -> bool | None:
    """Whether the ranks' weights are, by a number that tells them apart."""
    known = [weight for weight in weights if weight is not None]
    if len(known) < 2 or len(known) < len(weights):
        return None
    return all(math.isclose(weight, known[0], rel_tol=_ALIKE) for weight in known) or all(
        map(math.isnan, known)
    )


def no_steps(arm: str, ranks: Sequence[int], world_size: int) -> str:
    """Return what to say if `ranks` take no steps, though others do and are stopped after those."""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return (
        f"{arm}: {which} of {world_size} took no optimizer step, where others took theirs and were "
        "stopped: all ranks of a comparison must train, so start only those that do "
        "(--nproc-per-node)"
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


@dataclass(frozen=True)
class ArmVerdict:
    """An arm against stock.

    `speedup` is the ratio of the medians of the runs (stock / arm), `spread` the least and the
    greatest ratio of any two runs. `noise` is the relative difference that the runs of one arm have
    among themselves, added up over both arms. `word` is "faster" or "slower" only for a difference
    above all of these, and "faster" only where deepytorch had a part in it. Where `losses` say that
    it is another training, so does `word`, whatever the times.
    `setup_cost_s` is None where an arm has no run but the very first of all.
    """

    arm: str
    speedup: float
    spread: tuple[float, float]
    noise: float
    word: str
    setup_cost_s: float | None
    peak_bytes: int | None
    losses: LossAgreement

    def saved_s(self, steps: int, stock_step_s: float) -> float:
        """Seconds that a run of `steps` steps takes less, its one-off cost taken off.

        nan where that is not known, which it is after two rounds.
        """
        cost = math.nan if self.setup_cost_s is None else self.setup_cost_s
        return steps * stock_step_s * (1 - 1 / self.speedup) - cost


def judge(samples: Sequence[Sample], arm: str) -> ArmVerdict:
    """Compare the runs of `arm` with those of stock; at least one of each, all in their order."""
    theirs = [sample for sample in samples if sample.arm == STOCK]
    ours = [sample for sample in samples if sample.arm == arm]
    stock_s = [sample.step_s for sample in theirs]
    our_s = [sample.step_s for sample in ours]
    ratios = [slow / fast for slow in stock_s for fast in our_s]
    speedup = statistics.median(stock_s) / statistics.median(our_s)
    noise = _apart(stock_s) + _apart(our_s)
    word = SAME
    if min(len(ours), len(theirs)) >= 2 and abs(math.log(speedup)) > max(LEAST_GAIN, noise):
        if min(ratios) > 1:
            word = FASTER if any(map(_has_a_part, ours)) else NOT_OURS
        elif max(ratios) < 1:
            word = SLOWER
    losses = agreement(theirs, ours, [sample for sample in samples if sample.arm == NUDGED])
    if losses.apart is not None:
        word = OTHERWISE
    peaks = [sample.peak_bytes for sample in ours if sample.peak_bytes is not None]
    return ArmVerdict(
        arm=arm,
        speedup=speedup,
        spread=(min(ratios), max(ratios)),
        noise=math.expm1(noise),
        word=word,
        setup_cost_s=_setup_cost_s(samples[0], theirs, ours),
        peak_bytes=max(peaks, default=None),
        losses=losses,
    )


def _setup_cost_s(first: Sample, theirs: Sequence[Sample], ours: Sequence[Sample]) -> float | None:
    """Return `ours`' extra time until the warm-up is over; None if only the `first` run could tell.

    That one has filled caches which all others find filled: of files, of torch's compiler.
    """
    medians = [
        statistics.median(times)
        for arm in (ours, theirs)
        if (times := [sample.setup_s for sample in arm if sample is not first])
    ]
    return medians[0] - medians[1] if len(medians) == 2 else None


def _apart(times: Sequence[float]) -> float:
    """How far equal runs lie apart, as a logarithm: one that is slow by any factor has no bound."""
    return math.log(max(times) / min(times))


def _has_a_part(sample: Sample) -> bool:
    """Whether anything was done that could have made the run faster."""
    return bool(sample.native_calls or sample.seams or sample.kept)


def summary(
    samples: Sequence[Sample], verdicts: Sequence[ArmVerdict], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything as JSON's types; what is not a number there is None."""
    found: dict[str, Any] = _plain(
        {
            **facts,
            "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
            "runs": [vars(sample) | {"step_s": sample.step_s} for sample in samples],
        }
    )
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
