"""Replays of eager passes for as long as it is open whether the model is compiled."""

from __future__ import annotations

from deepytorch_core.compile.graph_trial import GraphTrial


class EarlyReplays:
    """A trial that runs beside the phases. It takes no compiler, so it comes first.

    Attributes:
        trial: how it is found out; None before it begins, and once it is over.
    """

    def __init__(self) -> None:
        self.trial: GraphTrial | None = None

    @property
    def is_tried(self) -> bool:
        """Whether it is found out now if eager passes are faster replayed."""
        return self.trial is not None and not self.trial.is_settled

    @property
    def is_replayed(self) -> bool:
        """Whether eager passes are replayed, and so are the compiled ones in turns with them."""
        return self.trial is not None and self.trial.is_replayed

    def on_step(self, is_whole: bool) -> bool:
        """Go on finding out; False once it is known. `is_whole`: see `GraphTrial.on_forward`."""
        if self.trial is None or self.trial.is_settled:
            return False
        self.trial.on_forward(is_whole)
        return not self.trial.is_settled

    def pause(self, is_paused: bool) -> None:
        """Have steps launched for now, or go on as decided."""
        if self.trial is not None:
            self.trial.pause(is_paused)

    def undo(self) -> None:
        """Give the model everything back."""
        if self.trial is not None:
            self.trial.undo()
            self.trial = None
