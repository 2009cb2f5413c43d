"""The phase in which eager steps and compiled ones take turns.

It ends at the look at their times that tells which are faster, or at the last one.
"""

from __future__ import annotations

from typing import Any

from deepytorch_core import guard
from deepytorch_core.compile import graph_trial, outcome, reasons, turns
from deepytorch_core.compile.life import ending
from deepytorch_core.compile.life.asking_phase import AskingPhase
from deepytorch_core.compile.life.state import CompilationState
from deepytorch_core.compile.policies import EAGER

# The first compiles, the next may compile for other sizes, the last is the first at its speed.
COMPILED_STEPS = 3


def num_untimed(state: CompilationState, num_settling: int) -> int:
    """Steps that are compiled, or captured, before times are taken."""
    first = graph_trial.CAPTURING_STEPS if state.early.is_replayed else COMPILED_STEPS
    return max(first, num_settling)


def last_step(state: CompilationState, first: int, num_settling: int = 0) -> int:
    """The step before which a trial ends at the latest that begins at `first`."""
    return first + num_untimed(state, num_settling) + turns.MOST_STEPS


class CompiledTrial(AskingPhase):
    """Begins with the present step, which is compiled.

    Args:
        state: the model's state, with regions in place.
        num_settling: steps until all sizes have their code.
    """

    def __init__(self, state: CompilationState, num_settling: int) -> None:
        super().__init__(state)
        self._first = state.steps.number
        self._num_settling = num_settling
        self._samples = turns.Samples()
        state.is_on = True

    @property
    def name(self) -> str:
        """Steps are measured once their code is there."""
        return "trial of compiled code" if self._measured >= 0 else "compiling"

    @property
    def last_step(self) -> int:
        """The step before the last look."""
        return last_step(self._state, self._first, self._num_settling)

    @property
    def _measured(self) -> int:
        """Measured steps before this one; below 0 until there are any."""
        untimed = num_untimed(self._state, self._num_settling)
        return self._state.steps.number - self._first - untimed

    def _look_back(self) -> None:
        state = self._state
        guard.synchronize(state.subject.device)
        seconds = state.steps.seconds(state.num_made)
        if turns.is_counted(self._measured):
            self._samples.add(state.is_on, seconds, state.trained_tokens())

    def _advance(self) -> None:
        if turns.is_look(self._measured):
            self._look()
        else:
            self._take_turn()

    def _take_turn(self) -> None:
        self._state.is_on = self._measured < 0 or turns.is_candidates(self._measured)

    def _look(self) -> None:
        failed = {
            region.region.name: region.failure for region in self._state.regions if region.failure
        }
        self._ask(f"times {self._state.steps.number}", (self._samples.rows(), failed), self._judge)

    def _judge(self, answers: list[Any]) -> None:
        state = self._state
        eager, compiled = self._samples.merged([rows for rows, _ in answers])
        is_last = turns.is_last_look(self._measured)
        outcome.give_up_alike(state.regions, [failed for _, failed in answers])
        verdict = turns.verdict(eager, compiled, is_last=is_last)
        if all(region.failure for region in state.regions):
            self.successor = ending.finish(state, EAGER, reasons.FAILED)
        elif verdict is not None:
            chosen = outcome.chosen(state.regions, state.subject.policy)
            times_ms = guard.in_ms({EAGER: eager, chosen: compiled})
            way = chosen if verdict == turns.FASTER else EAGER
            self.successor = ending.finish(state, way, reasons.OF_VERDICTS[verdict], times_ms)
        else:
            self._take_turn()
