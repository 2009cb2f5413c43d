"""`deepytorch tune --nodes`: the script's ranks on emulated nodes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from deepytorch.cli import compare


@dataclass(frozen=True)
class Wanted:
    """The options about emulated nodes, as they were given."""

    nodes: int
    ranks_per_node: str
    link: str
    flow_cap: str
    delay: str

    @property
    def counts(self) -> tuple[int, ...]:
        """Ranks of each node; none without emulation. Raises BenchError for a wrong text."""
        from deepytorch_core.bench.job import parse_ranks_per_node

        return parse_ranks_per_node(self.ranks_per_node, self.nodes) if self.nodes else ()

    @property
    def world_size(self) -> int:
        """All nodes' ranks; 0 without emulation."""
        return sum(self.counts)


@contextlib.contextmanager
def placed(job: compare.Job, wanted: Wanted) -> Iterator[compare.Job]:
    """The job on emulated nodes while open; without --nodes the job as it is.

    Raises EmulationError where nodes can't be emulated, and ValueError for a wrong option.
    """
    if not wanted.nodes:
        if wanted.link or wanted.flow_cap or wanted.delay:
            raise ValueError("--link, --flow-cap and --delay are for emulated nodes: give --nodes")
        yield job
        return
    from deepytorch_core.testing.emulation import Network, Setting, parse_delay, parse_rate

    setting = Setting(
        rate_bps=parse_rate(wanted.link) if wanted.link else None,
        flow_cap_bps=parse_rate(wanted.flow_cap) if wanted.flow_cap else None,
        delay_s=parse_delay(wanted.delay) if wanted.delay else 0.0,
    )
    with Network(wanted.nodes, setting) as network:
        yield dataclasses.replace(job, network=network)
