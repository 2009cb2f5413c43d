"""A node that loses its network before the ranks have met: nobody tells it, and it has to end."""

from __future__ import annotations

from deepytorch_core.testing.faults.cases import Case
from deepytorch_core.testing.faults.runner import run


def test_a_node_that_cannot_reach_the_store_gives_up_at_the_time_limit() -> None:
    result = run(Case("link down", "tcp", "init"))
    assert not result.skipped
    assert not result.wrong, "\n".join(result.wrong)
    assert len(result.took_s) == 2  # the one that is cut off, too
