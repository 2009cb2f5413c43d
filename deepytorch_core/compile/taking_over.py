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
_RANKS_LIMIT_S = 120.0


class TakingOver:
    """The order in which the parts of one model are taken over.

    Args:
        what: the decision that ranks make together.
        step_s: of a training step, the same on all ranks.
    """

    def __init__(self, what: str, step_s: float) -> None:
        self._what = what
        alone = self._ranks().size == 1
        self._asking_steps = 1 if alone else max(1, math.ceil(ASK_S / max(step_s, 1e-3)))
        self._number = -1
        self._num_seeing = 0
        self._done: list[str] = []

    def are_seen(self, unseen: Sequence[str]) -> bool:
        """Whether to go on; else the next step is for helpers, too. Asked after each that is.

        Args:
            unseen: the parts that were not called yet on this rank: the step has failed, or
                skipped them.

        Raises guard.RankMissing as `next_part` does.
        """
        self._num_seeing += 1
        is_last = self._num_seeing == SEEING_STEPS
        return is_last or not any(self._ranks().gather(bool(unseen)))

    def next_part(self, left: Sequence[str], is_done: Callable[[str], bool]) -> str | None:
        """The part for this step, if there is one; to be called in each, on all ranks alike.

        Args:
            left: the parts that were not taken over yet.
            is_done: whether this rank's helpers have done a part.

        Raises guard.RankMissing where a rank did not come to be asked.
        """
        self._number += 1
        if not self._done and self._number % self._asking_steps == 0:
            waited_for = self._ranks().gather([name for name in left if not is_done(name)])
            self._done = [name for name in left if not any(name in some for some in waited_for)]
        return self._done.pop(0) if self._done else None

    def _ranks(self) -> guard.Ranks:
        """Those of now: a script may end its process group, or make another, meanwhile."""
        return guard.Ranks(self._what, limit_s=_RANKS_LIMIT_S)
