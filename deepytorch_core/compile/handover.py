"""In which steps a training takes over what helpers have compiled: all ranks in the same ones.

Each part takes seconds to load, and ranks wait for each other in every step. So a part is taken
over when the helpers of all ranks have done it, by all ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from deepytorch_core import guard

# From one asking of all ranks to the next. A rank alone looks at its helpers in every step.
ASK_S = 5.0
# Steps in which helpers are given graphs, at most.
SEEING_STEPS = 3


class Handover:
    """The order in which the parts of one model are taken over.

    Args:
        ranks: that decide together, as they are now: a script may end its process group, or make
            another, meanwhile.
        step_s: of a training step, the same on all ranks.
        num_seeing: steps in which helpers are given graphs, at least.
    """

    def __init__(
        self, ranks: Callable[[], guard.Ranks], step_s: float, *, num_seeing: int = 1
    ) -> None:
        self._ranks = ranks
        alone = ranks().size == 1
        self._asking_steps = 1 if alone else max(1, math.ceil(ASK_S / max(step_s, 1e-3)))
        self._number = -1
        self._num_seeing = 0
        self._least_seeing = num_seeing
        self._question: guard.Question | None = None
        self._done: list[str] = []

    def are_seen(self, unseen: Sequence[bool]) -> bool:
        """Whether to go on; else the next step is for helpers, too. Told after each that is.

        Args:
            unseen: by rank, whether parts were not called yet there: the step has failed, or
                skipped them.
        """
        self._num_seeing += 1
        if self._num_seeing < self._least_seeing:
            return False
        return self._num_seeing >= SEEING_STEPS or not any(unseen)

    def next_part(self, left: Sequence[str], is_done: Callable[[str], bool]) -> str | None:
        """The part for this step, if there is one; to be called in each, on all ranks alike.

        Args:
            left: the parts that were not taken over yet.
            is_done: whether this rank's helpers have done a part.

        Raises guard.RankMissing where a rank did not come to be asked.
        """
        self._number += 1
        if self._question is None and not self._done and self._number % self._asking_steps == 0:
            undone = [name for name in left if not is_done(name)]
            self._question = self._ranks().ask("parts", undone)
        answers = None if self._question is None else self._question.answers()
        if answers is not None:
            self._question = None
            self._done = [name for name in left if not any(name in some for some in answers)]
        return self._done.pop(0) if self._done else None
