"""Whether a model's passes have all of their compiled code."""

from __future__ import annotations

from collections.abc import Sequence

from deepytorch_core.compile.region import CompiledRegion


class CodeReadiness:
    """Knows whether all code that passes need is there."""

    def __init__(self, regions: Sequence[CompiledRegion]) -> None:
        self._regions = regions
        self._num_unready = self._count()

    @property
    def applies(self) -> bool:
        """Whether the pass that begins takes compiled code."""
        return any(region.is_used for region in self._regions)

    def is_reached(self) -> bool:
        """Tell whether the passes since the last question had all of it."""
        before, self._num_unready = self._num_unready, self._count()
        return before == self._num_unready

    def _count(self) -> int:
        return sum(region.num_unready for region in self._regions)
