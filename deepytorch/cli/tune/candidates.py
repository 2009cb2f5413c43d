"""A setting as a job of the user's script: its step time, and whether it trains the same."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from deepytorch.cli import compare
from deepytorch_core.base.errors import CompareError
from deepytorch_core.compare import losses
from deepytorch_core.compare.result import Sample
from deepytorch_core.tune.knobs import DEFAULTS, Setting, as_dict, in_words
from deepytorch_core.tune.search import TuningTrial

WARMUP_STEPS = 3
"""Untimed: DDP builds its buckets in the second step, and the engine measures in the first."""

# A trial that is so much slower than the best is ended, if that saves more than it costs.
_CLEARLY_SLOWER = 1.3
_WORTH_ENDING_S = 3.0
_LEAST_BLOCKS = 2

_RANK = re.compile(r"^\[rank\d+\]: ")
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt|Killed)\b.*")
_LONGEST = 200


class Candidates:
    """Runs settings of one script, each in processes of its own.

    Args:
        job: the script; its `steps` are those of a trial, with the warm-up.
        variables: environment variables of every run.
    """

    def __init__(self, job: compare.Job, variables: Mapping[str, str]) -> None:
        self._job = job
        self._variables = {"DEEPYTORCH_ENABLED": "1", **variables}
        self._defaults: list[Sample] = []
        self.remarks: list[str] = []

    @property
    def steps(self) -> int:
        """Measured steps of a trial."""
        return self._job.steps - WARMUP_STEPS

    @property
    def sees_losses(self) -> bool:
        """Whether the script's loss was seen, and so is compared."""
        return any(loss is not None for sample in self._defaults for loss in sample.losses)

    def explore(self, least_steps: int) -> Sample:
        """The first run, with the defaults. A script that ends earlier shortens all that follow.

        Raises CompareError for a script that fails, or takes fewer than `least_steps` steps.
        """
        sample = self._run(DEFAULTS, None)
        if not sample.is_complete:
            if sample.steps < WARMUP_STEPS + least_steps:
                raise CompareError(compare.too_short(sample.steps, WARMUP_STEPS + least_steps))
            self._job = dataclasses.replace(self._job, steps=sample.steps)
            sample = self._run(DEFAULTS, None)
        self._defaults.append(sample)
        return sample

    def measure(self, setting: Setting, best: TuningTrial | None) -> TuningTrial:
        """One trial; it is ended early where it is clearly slower than `best`."""
        return self._trial(setting, self._watch(best) if setting != DEFAULTS else None)

    def repeat(self, setting: Setting) -> TuningTrial:
        """One trial to the end."""
        return self._trial(setting, None)

    def _trial(self, setting: Setting, watch: compare.Watch | None) -> TuningTrial:
        try:
            sample = self._run(setting, watch)
        except compare.StoppedEarly as stopped:
            steps = len(stopped.block_s)
            return TuningTrial(setting=setting, step_s=stopped.block_s, steps=steps, is_whole=False)
        except CompareError as error:
            output = str(error)
            problem = f"failed: {_exception(output)}"
            return TuningTrial(
                setting=setting, step_s=(), steps=self.steps, problem=problem, output=output
            )
        problem = "" if setting == DEFAULTS else self._another_loss(sample)
        if setting == DEFAULTS:
            self._defaults.append(sample)
        return TuningTrial(
            setting=setting, step_s=sample.block_s, steps=self.steps, problem=problem
        )

    def _run(self, setting: Setting, watch: compare.Watch | None) -> Sample:
        arm = compare.Arm(
            name=in_words(setting),
            variables=self._variables,
            settings=as_dict(setting),
            warmup_steps=WARMUP_STEPS,
            hint="",
        )
        sample = compare.run_once(self._job, arm, self.remarks, watch)
        if self._defaults and sample.steps != self._job.steps:
            raise CompareError(
                f"it took {sample.steps} optimizer steps where the defaults took {self._job.steps}"
            )
        return sample

    def _watch(self, best: TuningTrial | None) -> compare.Watch | None:
        if best is None or not best.step_s:
            return None
        limit = _CLEARLY_SLOWER * best.median_s

        def is_hopeless(block_s: Sequence[float]) -> bool:
            # The fastest step of a noisy run; what is left of it must be worth ending it.
            left = self.steps - len(block_s)
            return (
                len(block_s) >= _LEAST_BLOCKS
                and min(block_s) > limit
                and left * min(block_s) > _WORTH_ENDING_S
            )

        return is_hopeless

    def _another_loss(self, sample: Sample) -> str:
        """Why its losses are not those of the defaults; "" if they are."""
        apart = losses.agreement(self._defaults, [sample], whose="the defaults'").apart
        return "" if apart is None else f"another training: {apart}"


def _exception(text: str) -> str:
    """The exception that a failed run's output tells of, as one line."""
    lines = [_RANK.sub("", line).strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _EXCEPTION.match(line) and "ChildFailed" not in line]
    return (errors[:1] or lines[-1:] or ["nothing was said"])[0][:_LONGEST]
