"""The phase in which a model stays: nothing is measured any more."""

from __future__ import annotations

from deepytorch_core.compile.graph_trial import GraphTrial
from deepytorch_core.compile.life.phase import CompilationPhase


class Decided(CompilationPhase):
    """Keeps nothing that leads back to the compilation: the model's last user lets all of it go.

    Args:
        graphs: the trial whose graphs the model's passes are replayed from, or were not faster.
    """

    is_settled = True

    def __init__(self, graphs: GraphTrial | None = None) -> None:
        super().__init__()
        self.graphs = graphs

    @property
    def name(self) -> str | None:
        """None: the report is about trials."""
        return None

    @property
    def last_step(self) -> int | None:
        """None: no step is waited for."""
        return None

    def on_step(self) -> None:
        """The step runs as was decided."""
