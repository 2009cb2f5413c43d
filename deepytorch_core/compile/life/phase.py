"""The interface of a phase of a model's compilation."""

from __future__ import annotations

from abc import ABC, abstractmethod

from deepytorch_core.compile.graph_trial import GraphTrial
from deepytorch_core.compile.region import CompiledRegion


class CompilationPhase(ABC):
    """Decides how each step of a training is run, until another phase follows.

    Attributes:
        successor: the phase that follows, from the step that begins on; None: this one goes on.
        graphs: the CUDA graphs that are tried for good, or stay; None: there are none.
        is_waiting: whether steps run without compiled code while other processes compile.
        is_settled: whether nothing is measured any more.
    """

    graphs: GraphTrial | None = None
    is_waiting = False
    is_settled = False

    def __init__(self) -> None:
        self.successor: CompilationPhase | None = None

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The purpose of the step that begins, for the report; None where there is none."""

    @property
    @abstractmethod
    def last_step(self) -> int | None:
        """After how many steps all is decided at the latest; None where it is."""

    @abstractmethod
    def on_step(self) -> None:
        """Choose the way of the step that begins.

        Raises guard.RankMissing where a rank did not come to be asked.
        """

    def takes_code(self, region: CompiledRegion) -> bool:
        """Whether `region` is compiled in this step, although the model as a whole is not."""
        return False

    def switch(self, is_replayed: bool) -> None:  # noqa: B027 - most phases take no turns of graphs
        """Follow a trial of CUDA graphs, which says whether the step that begins is replayed."""

    def close(self) -> None:  # noqa: B027 - most phases have nothing at work beside the steps
        """Stop what goes on beside the steps: the phase is cut short."""
