"""The base of the phases that count steps, and go on when all ranks have answered."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from deepytorch_core.compile.life.phase import CompilationPhase
from deepytorch_core.compile.life.state import CompilationState


class AskingPhase(CompilationPhase):
    """Steps go on as they are while an answer is outstanding, and are not counted.

    Args:
        state: the model's state.
    """

    def __init__(self, state: CompilationState) -> None:
        super().__init__()
        self._state = state

    def on_step(self) -> None:
        """Look back at the step that is over, count the next one and choose its way."""
        state = self._state
        try:
            if not state.asking.is_open:
                self._look_back()
                state.steps.number += 1
                self._advance()
            state.asking.hear()
        finally:
            state.steps.begin(state.num_made)

    @abstractmethod
    def _look_back(self) -> None:
        """Take what there is to be known from the step that is over."""

    @abstractmethod
    def _advance(self) -> None:
        """Choose the way of the step that begins, or ask the ranks about it."""

    def _ask(self, what: str, value: Any, then: Callable[[list[Any]], None]) -> None:
        self._state.asking.ask(self._state.subject.ranks().ask(what, value), then)
