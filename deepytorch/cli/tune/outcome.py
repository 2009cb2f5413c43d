"""All that one search of `deepytorch tune` found."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.tune import stored
from deepytorch_core.tune.confirm import Confirmation
from deepytorch_core.tune.knobs import DEFAULTS, in_words
from deepytorch_core.tune.search import TuningTrial
from deepytorch_core.tune.space import Space


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that one search found.

    `confirmation` is None where nothing beat the defaults in the search.
    """

    script: str
    space: Space
    trials: tuple[TuningTrial, ...]
    best: TuningTrial
    confirmation: Confirmation | None
    sees_losses: bool
    remarks: tuple[str, ...]

    @property
    def tuned(self) -> stored.Tuned:
        """Return what the profile is to say."""
        repeated = self.confirmation
        if repeated is None:
            return stored.Tuned(DEFAULTS, "nothing was faster than the defaults", {})
        reason = repeated.reason
        if repeated.kept == DEFAULTS:
            reason = f"the defaults stay: {in_words(self.best.setting)} {reason}"
        return stored.Tuned(repeated.kept, reason, repeated.times_ms)
