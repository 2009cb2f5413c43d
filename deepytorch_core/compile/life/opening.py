"""The first phase of a model under `auto`: steps are eager until the time to compile has come.

The first step asks what the profile knows, which may end all. After a few more, ranks tell their
pace, again and again in a patient run. The phase ends under two conditions. The run has lasted long
enough for what a trial takes of it, and everything that changes the model's passes is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepytorch_core import guard
from deepytorch_core.base import compiler_import
from deepytorch_core.compile import (
    ahead,
    capture,
    cost_model,
    policies,
    reasons,
    regions,
    undecided,
)
from deepytorch_core.compile.life import compiled_trial, ending
from deepytorch_core.compile.life.asking_phase import AskingPhase
from deepytorch_core.compile.life.compiled_trial import CompiledTrial
from deepytorch_core.compile.life.state import CompilationState
from deepytorch_core.compile.life.waiting_for_helpers import WaitingForHelpers
from deepytorch_core.compile.policies import EAGER

EAGER_STEPS = 3
# Steps in which batches of a few sizes have had each of them, several times.
SIZES_STEPS = 36
# Steps after which it is asked again whether the time has come.
PATIENT_STEPS = 4
# Steps whose batches have to be of one size, before replays of them are tried that may change yet.
UNIFORM_STEPS = 8
# Steps after which it is not waited any more for what is found out about the model.
MOST_WAITING = 2000


class Opening(AskingPhase):
    """Begins before the first step.

    Args:
        state: the model's state.
    """

    def __init__(self, state: CompilationState) -> None:
        super().__init__(state)
        self._start_at = 0  # step that asks what is known
        self._first = EAGER_STEPS  # step that may be compiled
        self._outlook = cost_model.Outlook()
        self._num_settling = 0  # steps until all sizes have their code

    @property
    def name(self) -> str:
        """Steps count as compiling while ranks are asked whether they begin to."""
        return "eager steps" if self._state.steps.number < self._first else "compiling"

    @property
    def last_step(self) -> int:
        """Told as if no question put it off again."""
        return compiled_trial.last_step(self._state, self._first, self._num_settling)

    def _look_back(self) -> None:
        if self._state.steps.number < EAGER_STEPS:  # later ones are not to be held up
            guard.synchronize(self._state.subject.device)

    def _advance(self) -> None:
        number = self._state.steps.number
        if number <= self._start_at:
            if number == self._start_at:
                self._begin()
            return
        self._state.early.on_step(self._state.steps.is_whole)
        if number == self._first:
            self._ask_pace()

    def _begin(self) -> None:
        """Ask the profile: nothing is measured that it knows."""
        state, subject = self._state, self._state.subject
        state.kept.look_at(subject.root, subject.device)
        own = state.kept.find(subject.ranks().size), self._is_unknown()
        self._ask(f"start {state.steps.number}", own, self._start)

    def _start(self, answers: list[Any]) -> None:
        state, device = self._state, self._state.subject.device
        known = answers[0][0]
        reason = guard.why_not_measured()
        if known is not None and any(is_open for _, is_open in answers):
            # Code and graphs of passes that are about to change would be made in vain.
            self._start_at = state.steps.number + PATIENT_STEPS
            self._first = self._start_at + EAGER_STEPS
            if known["chosen"] != EAGER and known.get("was_helped") and self._may_be_helped():
                self._start_helpers()
        elif known is not None:
            self._take_known(known)
        elif reason is not None:
            self.successor = ending.finish(state, EAGER, f"not measured: {reason}")
        elif not policies.automatic(device):
            self.successor = ending.finish(state, EAGER, f"there is no policy for {device.type}")

    def _take_known(self, known: Mapping[str, Any]) -> None:
        """Do what an earlier run has found to be faster."""
        chosen, reason = known["chosen"], reasons.FROM_PROFILE
        if chosen != EAGER:
            self._install_known(known)
            if not self._state.regions:
                chosen, reason = EAGER, reasons.NOTHING
        self.successor = ending.finish(self._state, chosen, reason)

    def _install_known(self, known: Mapping[str, Any]) -> None:
        state, subject = self._state, self._state.subject
        was_helped = known.get("was_helped", False)
        is_helped = self._may_be_helped()
        is_made = was_helped and not is_helped
        state.install(known.get("regions", {}), budget_s=subject.budget_s, is_made=is_made)
        state.is_on = True
        if is_helped and state.regions:
            # Helpers find it in torch's caches, a second or two for each graph.
            self._are_sizes_open()
            are_few = capture.sizes_of(subject.root) is not None
            state.helpers().start(len(state.regions))
            for region in state.regions:
                region.send_later(state.helpers(), are_few=are_few)

    def _may_be_helped(self) -> bool:
        """Whether helpers find in torch's caches what an earlier run has compiled."""
        return bool(self._state.subject.is_patient and self._state.subject.may_help())

    def _start_helpers(self) -> None:
        """Have helpers ready when there is work: what they begin with takes them seconds."""
        state = self._state
        if not state.has_helpers:
            root = state.subject.root
            found = regions.parts(root) if ahead.is_in_parts(root) else regions.find(root)
            state.helpers().start(len(found))

    def close(self) -> None:
        """Stop helpers that wait for work."""
        self._state.close_helpers()

    def _ask_pace(self) -> None:
        """How long a step takes, and whether helpers can compile the model, on all ranks."""
        state, subject = self._state, self._state.subject
        step_s, lasted_s = state.steps.pace()
        is_helped = self._outlook.is_helped(subject.root, lasted_s, subject.may_help)
        is_open = self._is_unknown()
        has_sizes = capture.sizes_of(subject.root) is not None
        facts = is_open, has_sizes, not has_sizes and self._is_uniform
        own = (step_s, lasted_s, is_helped, *facts)
        self._ask(f"pace {state.steps.number}", own, self._set_pace)

    def _is_unknown(self) -> bool:
        """Whether something is still found out that changes the model's passes."""
        is_open = self._state.subject.is_patient and self._state.steps.number < MOST_WAITING
        return is_open and (undecided.is_open(self._state.subject.root) or self._are_sizes_open())

    def _are_sizes_open(self) -> bool:
        """Whether it is still to be known which few sizes batches will have."""
        self._state.subject.want_few_sizes(True)
        sizes = capture.sizes_of(self._state.subject.root)
        return sizes is not None and not sizes.are_few

    @property
    def _is_uniform(self) -> bool:
        steps = self._state.steps
        return steps.number >= UNIFORM_STEPS and steps.is_uniform

    def _set_pace(self, answers: list[Any]) -> None:
        """Go on once the run has lasted long enough, and its passes are what they will be."""
        steps_s, lasted_s, are_helped, are_open, *more = zip(*answers, strict=True)
        are_few, are_uniform = more
        state, is_patient = self._state, self._state.subject.is_patient
        is_helped = all(are_helped)
        least_s = self._outlook.least_run_s(state.subject.root, is_helped=is_helped)
        self._num_settling = SIZES_STEPS if is_patient and any(are_few) else 0
        if is_patient and is_helped and min(lasted_s) >= least_s:
            self._start_helpers()
        if any(are_open):
            self._first += PATIENT_STEPS
            if all(are_uniform):
                state.begin_early()  # a helper may take long, and rows without padding stay whole
        elif is_patient and not is_helped:
            self.successor = ending.finish(state, EAGER, reasons.HELD_UP)
        elif is_patient and min(lasted_s) < least_s:
            compiler_import.load_beside()
            self._first += PATIENT_STEPS
            state.begin_early()  # which takes no compiler, and goes on beside the helpers
        else:
            self._start_compiling(max(steps_s), is_helped)

    def _start_compiling(self, step_s: float, is_helped: bool) -> None:
        state, subject = self._state, self._state.subject
        state.was_helped = is_helped
        budget_s = subject.budget_s
        if subject.steps is not None:
            whole_s = step_s * subject.steps
            cost_s = cost_model.cost_s(subject.root, is_helped=is_helped)
            if whole_s < cost_model.least_run_s(cost_s):
                why = f"a run of {whole_s:.0f} s would not earn a compile back"
                self.successor = ending.finish(state, EAGER, why)
                return
            budget_s = min(budget_s, max(cost_s, cost_model.LARGEST_SHARE * whole_s))
        is_in_parts = is_helped and ahead.is_in_parts(subject.root)
        state.install({}, budget_s=budget_s, is_in_parts=is_in_parts)
        if not state.regions:
            self.successor = ending.finish(state, EAGER, reasons.NOTHING)
            return
        if is_helped:
            self.successor = WaitingForHelpers(
                state,
                step_s=step_s,
                num_settling=self._num_settling,
            )
        else:
            self.successor = CompiledTrial(state, self._num_settling)
        # Parts that helpers could not do are compiled here one in a step, all else in one step.
        state.hold_off(budget_s * (1 if is_helped else len(state.regions)))
