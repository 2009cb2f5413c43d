"""The phase of a model whose policy was asked for by name.

Nothing is measured: it ends when two steps have shown whether its code can be made.
"""

from __future__ import annotations

from deepytorch_core import guard
from deepytorch_core.base import console
from deepytorch_core.compile import policies, reasons
from deepytorch_core.compile.life import compiled_trial, ending
from deepytorch_core.compile.life.asking_phase import AskingPhase
from deepytorch_core.compile.life.opening import EAGER_STEPS
from deepytorch_core.compile.policies import EAGER


class AskedFor(AskingPhase):
    """Compiles from the first step on."""

    @property
    def name(self) -> str:
        """All of its steps may compile."""
        return "compiling"

    @property
    def last_step(self) -> int:
        """Told as for a model that is measured; it takes fewer."""
        return compiled_trial.last_step(self._state, EAGER_STEPS)

    def _look_back(self) -> None:
        if self._state.is_on:
            guard.synchronize(self._state.subject.device)  # its time is told in the profile

    def _advance(self) -> None:
        state, policy = self._state, self._state.subject.policy
        if state.steps.number == 0:
            self._begin()
        elif state.steps.number == 1:
            state.conclude(policy, reasons.ASKED_FOR, None)
        else:
            state.keep(policy, reasons.ASKED_FOR, {})
            self.successor = ending.try_replays(state)

    def _begin(self) -> None:
        state, subject = self._state, self._state.subject
        state.kept.look_at(subject.root, subject.device)
        reason = policies.get(subject.policy).why_not(subject.device)
        if reason is not None:
            why = f"{subject.policy} can't be used: {reason}"
            console.say_once(f"{subject.what}: {why}: it runs eagerly", level="warning")
            self.successor = ending.finish(state, EAGER, why)
            return
        state.install({}, budget_s=subject.budget_s)
        state.is_on = True
        if not state.regions:
            self.successor = ending.finish(state, EAGER, reasons.NOTHING)
