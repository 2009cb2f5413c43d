"""The phase in which steps that launch and steps that replay CUDA graphs take turns.

It ends with the verdict of its `GraphTrial`. That of compiled code was spoken before, or follows
from this one: if launches take the time, savings on the GPU show only when steps are replayed.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass

from deepytorch_core.compile import outcome, reasons, turns
from deepytorch_core.compile.code_readiness import CodeReadiness
from deepytorch_core.compile.graph_trial import GraphTrial
from deepytorch_core.compile.life.decided import Decided
from deepytorch_core.compile.life.phase import CompilationPhase
from deepytorch_core.compile.life.state import CompilationState
from deepytorch_core.compile.policies import EAGER

# Steps that the trial waits for helpers' code. Sizes that never come again get none.
MOST_HELD = 500
# It waits where more than this part of so many last steps had calls without compiled code.
LARGEST_UNREADY, LOOKED_AT = 0.25, 16


@dataclass(frozen=True)
class OpenVerdict:
    """A verdict on compiled code that replays may turn round.

    Attributes:
        reason: why eager steps stay, if they don't.
        times_ms: of eager and compiled steps.
    """

    reason: str
    times_ms: Mapping[str, float]


class ReplayTrial(CompilationPhase):
    """Finds out for good whether passes are faster replayed.

    Args:
        state: the model's state.
        graphs: the trial.
        verdict: on compiled code, if that is open. Replayed steps are the compiled ones then.
    """

    graphs: GraphTrial

    def __init__(
        self, state: CompilationState, graphs: GraphTrial, verdict: OpenVerdict | None = None
    ) -> None:
        super().__init__()
        self.graphs = graphs
        self._state = state
        self._verdict = verdict
        self._num_held = 0
        self._readiness = CodeReadiness(state.regions)
        # Whether the last steps had calls without compiled code.
        self._were_unready: collections.deque[bool] = collections.deque(maxlen=LOOKED_AT)

    @property
    def name(self) -> str:
        """The one purpose."""
        return "trial of CUDA graphs"

    @property
    def last_step(self) -> int:
        """Steps are not counted here: this much is left at most."""
        held = (MOST_HELD - self._num_held) * self._is_held
        return self._state.steps.number + 2 * turns.MOST_STEPS + held

    def on_step(self) -> None:
        """Go on with the trial, or end with its verdict."""
        self._were_unready.append(not self._readiness.is_reached())
        if self._num_held < MOST_HELD and self._is_held:
            self._num_held += 1  # there is nothing yet that could be captured
            return
        self.graphs.on_forward(self._state.steps.is_whole)
        if not self.graphs.is_settled:
            return
        if self._verdict is not None:
            self._conclude(self._verdict, self.graphs.is_replayed)
        self.successor = Decided(self.graphs)

    @property
    def _is_held(self) -> bool:
        """Whether helpers still have code that most steps need, and that is to be captured."""
        if not self._state.is_on or self.graphs.is_measured:
            return False
        regions = self._state.regions
        is_waiting = any(region.is_waiting for region in regions)
        are_many = sum(self._were_unready) > LARGEST_UNREADY * len(self._were_unready)
        return any(region.is_awaited for region in regions) or (is_waiting and are_many)

    def switch(self, is_replayed: bool) -> None:
        """Have replayed steps compiled and launched ones eager, if that is what is compared."""
        if self._verdict is not None:
            self._state.is_on = is_replayed

    def _conclude(self, verdict: OpenVerdict, is_replayed: bool) -> None:
        state = self._state
        chosen = outcome.chosen(state.regions, state.subject.policy) if is_replayed else EAGER
        reason = reasons.WHEN_REPLAYED if is_replayed else verdict.reason
        state.conclude(chosen, reason, verdict.times_ms)
