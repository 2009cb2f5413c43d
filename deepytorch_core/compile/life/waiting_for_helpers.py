"""The phase in which other processes compile while the training's steps go on.

A few steps are compiled so far that their graphs go to the helpers. The next ones are eager, and
may be replayed. Parts are taken over as helpers have done them; the last one ends the phase.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepytorch_core.compile.handover import Handover
from deepytorch_core.compile.helping import Helping
from deepytorch_core.compile.life import compiled_trial
from deepytorch_core.compile.life.asking_phase import AskingPhase
from deepytorch_core.compile.life.compiled_trial import CompiledTrial
from deepytorch_core.compile.life.state import CompilationState
from deepytorch_core.compile.region import CompiledRegion


class WaitingForHelpers(AskingPhase):
    """Begins with the present step, which is for helpers.

    Args:
        state: the model's state, with regions in place.
        step_s: seconds of a step, the same on all ranks.
        num_settling: steps until all sizes have their code.
    """

    is_waiting = True

    def __init__(self, state: CompilationState, *, step_s: float, num_settling: int) -> None:
        super().__init__(state)
        subject = state.subject
        self._num_settling = num_settling
        order = Handover(subject.ranks, step_s, num_seeing=max(1, num_settling))
        is_patient = subject.is_patient
        self.helping = Helping(state.helpers(), order, state.regions, is_patient=is_patient)
        self._show_helpers(True)

    @property
    def name(self) -> str:
        """It goes by what this step does for helpers, or with their work."""
        if self._state.is_on:
            return "giving graphs to helpers"
        if self.helping.is_loading:
            return "taking over what helpers have compiled"
        return "trial of CUDA graphs" if self._state.early.is_tried else "waiting for helpers"

    @property
    def last_step(self) -> int:
        """Told as if helpers were done now: nobody knows when they are."""
        return compiled_trial.last_step(self._state, self._state.steps.number, self._num_settling)

    def takes_code(self, region: CompiledRegion) -> bool:
        """Whether helpers have done that region.

        A pass that is captured meanwhile, for other sizes, has to be eager.
        """
        is_taken_over = not region.is_prepared
        return is_taken_over and (self.helping.is_loading or not self._state.early.is_replayed)

    def close(self) -> None:
        """Stop the helpers."""
        self.helping.close()

    def _look_back(self) -> None:
        """Nothing is measured while helpers have the cores."""

    def _advance(self) -> None:
        if self._state.is_on:  # the last step was for helpers
            self._show_helpers(False)
            unseen = self.helping.unseen()
            self._ask("seen", bool(unseen), lambda answers: self._saw(answers, unseen))
        else:
            self._take_over()

    def _show_helpers(self, is_on: bool) -> None:
        """Whether the step that begins is for helpers."""
        self._state.is_on = is_on
        self._state.early.pause(is_on)

    def _saw(self, answers: Sequence[bool], unseen: Sequence[str]) -> None:
        """Give graphs to helpers in another step, or wait for their work."""
        if self.helping.are_seen(answers, unseen):
            self._take_over()
        else:
            self._show_helpers(True)

    def _take_over(self) -> None:
        """Have this step take a part over, if one is done and replays are tried no more."""
        state = self._state
        self.helping.is_loading = False
        state.begin_early()
        if state.early.on_step(state.steps.is_whole):
            return
        is_open = self.helping.take_over()
        state.early.pause(self.helping.is_loading)
        if not is_open:
            self.helping.end(state.subject.what)
            # As if compiling began now: in this process that takes next to no time.
            self.successor = CompiledTrial(state, self._num_settling)
