"""The work of `deepytorch.compile` on one model: it goes from phase to phase with its training.

    phase                ends
    Opening              when the run is long enough, and the model known; at once by the profile
    WaitingForHelpers    when all that other processes have compiled is taken over
    CompiledTrial        when eager or compiled steps are faster beyond the noise
    ReplayTrial          when steps are faster launched, or replayed as CUDA graphs
    Decided              never

A policy's name takes a model from `AskedFor` to the last two. Phases may be left out; none comes
again. Each is a file of `life`, and `life/state.py` has what they share.

Every step is one of the training's own. Ranks take the same way: they count their forward passes
alike, and decide from the slowest rank's times. None waits for that: steps go on until all have
answered (`Ranks.ask`). Replays of eager passes are tried beside the first two phases, if other
processes compile (`EarlyReplays`). If they are faster, compiled code is replayed in the turns, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepytorch_core import guard
from deepytorch_core.compile import cost_model, late_cache, module_state, seam
from deepytorch_core.compile.life.asked_for import AskedFor
from deepytorch_core.compile.life.decided import Decided
from deepytorch_core.compile.life.opening import Opening
from deepytorch_core.compile.life.phase import CompilationPhase
from deepytorch_core.compile.life.state import CompilationState
from deepytorch_core.compile.life.subject import Subject
from deepytorch_core.compile.phases import OpenTrial
from deepytorch_core.compile.policies import AUTO, EAGER


class Compilation(CompilationState):
    """One model's; made by `deepytorch.compile`.

    Args:
        model: the user's.
        policy: "auto", "eager" or a policy's name.
        budget_s: seconds of compiling for each region.
        steps: how many training steps the run has, if known.
        is_patient: whether, in a run of unknown length, nothing is tried before the run has lasted
            long enough for what that takes of it. Nor does a step of such a run wait for a
            compiler.
        group: the ProcessGroup whose ranks train the model together; None: the default one's.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str,
        *,
        budget_s: float,
        steps: int | None,
        is_patient: bool = False,
        group: Any = None,
    ) -> None:
        subject = Subject(
            model, policy, budget_s=budget_s, steps=steps, is_patient=is_patient, group=group
        )
        super().__init__(subject)
        self.phase = self._first_phase()
        self._seam = seam.opened(subject.root)
        if self._seam is None:  # a script's own compile lies there
            self.phase = Decided()
        else:
            # Before the hooks that pack batches: it decides how.
            self._seam.watcher = self
            late = late_cache.of(subject.root, is_on=self._is_used, switch=self._set_on)
            self._seam.around = late

    def _first_phase(self) -> CompilationPhase:
        return Opening(self) if self.policy == AUTO else AskedFor(self)

    def undo(self) -> None:
        """Give the model everything back; decisions stay in the report and the profile."""
        graphs = self.phase.graphs
        self._settle(Decided(graphs))
        if graphs is not None:
            graphs.undo()
        self.early.undo()
        self.drop_regions()
        seam.close(self.subject.root, is_around=False)

    def _is_used(self) -> bool:
        """Whether the call that begins is compiled, in part, too, or may be replayed."""
        is_replayed = self.phase.graphs is not None or self.early.is_tried
        return self.is_on or self.phase.is_waiting or is_replayed

    def _set_on(self, is_on: bool) -> bool:
        before, self.is_on = self.is_on, is_on
        return before

    @property
    def policy(self) -> str:
        """The one asked for."""
        return self.subject.policy

    @property
    def run_length(self) -> cost_model.RunLength:
        """How long the run lasts, as far as is known."""
        return self.steps.run_length

    @property
    def is_settled(self) -> bool:
        """Whether nothing is measured any more."""
        return self.phase.is_settled

    @property
    def is_waiting(self) -> bool:
        """Whether steps run without compiled code while other processes compile."""
        return self.phase.is_waiting

    @property
    def trial(self) -> OpenTrial | None:
        """How far the measuring is; None before the first step and where it is settled."""
        last = self.phase.last_step
        if last is None or self.steps.number < 0:
            return None
        is_begun = bool(self.regions) or self.phase.graphs is not None
        return OpenTrial(self.subject.what, is_begun, self.steps.number, last)

    def on_forward(self, args: Any, kwargs: Any) -> None:
        """Called before each forward pass of the model."""
        is_first = self.steps.number < 0
        if not torch.is_grad_enabled() or (is_first and module_state.is_lazy(self.subject.root)):
            self.steps.is_whole = False
            return
        try:
            self.phase.on_step()
        except guard.RankMissing as error:
            self.give_up(str(error))
        self._move_on()
        self.steps.receive(args, kwargs)
        self.phases.enter(self.phase.name)

    def _move_on(self) -> None:
        """Enter the phase that follows, if the present one has ended."""
        after = self.phase.successor
        if after is not None and after.is_settled:
            self._settle(after)
        elif after is not None:
            self.phase = after

    def give_up(self, reason: str) -> None:
        """A rank did not come, so it is not asked again; or something here has raised."""
        self._move_on()
        self.early.undo()
        self.conclude(EAGER, reason, None)
        self._settle(Decided(self.phase.graphs))

    def _settle(self, after: CompilationPhase) -> None:
        """Enter the last phase: steps are not heard of any more."""
        self.phase.close()
        self.phase = after
        if not self.is_on:  # not before: replays want the sizes that there are
            self.subject.want_few_sizes(False)
        if self._seam is not None:
            self._seam.watcher = None
            self._seam = None
            is_replayed = after.graphs is not None and after.graphs.is_replayed
            seam.close(self.subject.root, is_around=self.is_on or is_replayed)
        self.asking.drop()
        self.lower()
