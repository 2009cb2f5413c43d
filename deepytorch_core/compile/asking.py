"""One question to all ranks at a time, and what is done once it is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepytorch_core import guard


class Asking:
    """Goes on with a decision when the ranks have answered; see NOTE [Nobody waits]."""

    def __init__(self) -> None:
        self._question: guard.Question | None = None
        self._then: Callable[[list[Any]], None]

    @property
    def is_open(self) -> bool:
        """Whether an answer is outstanding."""
        return self._question is not None

    def ask(self, question: guard.Question, then: Callable[[list[Any]], None]) -> None:
        """Have `then` called with every rank's answer, by `hear`."""
        self._question, self._then = question, then

    def hear(self) -> None:
        """Go on, where all have answered; that may ask the next question.

        Raises guard.RankMissing where a rank did not come; the question is dropped then.
        """
        while self._question is not None:
            question, self._question = self._question, None
            answers = question.answers()
            if answers is None:
                self._question = question
                return
            self._then(answers)

    def drop(self) -> None:
        """Forget the question."""
        self._question = None
