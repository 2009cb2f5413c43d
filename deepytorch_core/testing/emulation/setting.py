"""Says what a network of emulated nodes is to be, and which rank lives on which node."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ORDERS = ("block", "cyclic", "random")
_UNITS_BPS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:bit|bps|bit/s)?", re.IGNORECASE)
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)

# An idle link lets so much through at once. It is little, lest small messages seem faster than the
# link, but as much as passes while the kernel's timer is late.
_BURST_S, _MIN_BURST_BYTES = 60e-6, 15000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A network: `rate_bps` is what a node can send, and receive, at once.

    `flow_cap_bps` limits each TCP flow besides, `delay_s` is added to each frame once on its way
    from node to node. None is no limit.
    """

    rate_bps: float | None = None
    flow_cap_bps: float | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("link", self.rate_bps), ("flow cap", self.flow_cap_bps)):
            if value is not None and not 1e5 <= value <= 4e11:
                raise ValueError(f"the {name} must lie between 100kbit and 400gbit")
        if not 0 <= self.delay_s <= 1:
            raise ValueError(f"a delay of {self.delay_s} s: at most 1s, at least 0")
        if self.flow_cap_bps is not None and self.rate_bps is None:
            raise ValueError("a flow cap needs the link's rate besides")

    @property
    def burst_bytes(self) -> int:
        """The bytes that a link lets through at once after it was idle."""
        return 0 if self.rate_bps is None else burst_bytes(int(self.rate_bps / 8))

    def to_dict(self) -> dict[str, Any]:
        """For records: rates in Mbit/s, the delay in ms; None where there is no limit."""
        return {
            "link_mbit": None if self.rate_bps is None else self.rate_bps / 1e6,
            "flow_cap_mbit": None if self.flow_cap_bps is None else self.flow_cap_bps / 1e6,
            "delay_ms": self.delay_s * 1e3,
        }


def burst_bytes(rate: int) -> int:
    """Return what an idle link of `rate` bytes per second lets through at once."""
    return max(_MIN_BURST_BYTES, int(rate * _BURST_S))


@dataclass(frozen=True)
class Seat:
    """The place of a rank: its node, its number there, and its number over all nodes in order.

    The last is also the number of its GPU if one machine's GPUs are dealt out to the nodes.
    """

    node: int
    local_rank: int
    device: int


def seats(ranks_per_node: Sequence[int], order: str = "block", *, seed: int = 0) -> list[Seat]:
    """The seat of each rank, by rank.

    Args:
        ranks_per_node: how many ranks each node has, at least 1.
        order: "block" fills one node after the other, "cyclic" deals the ranks out in turns,
            "random" shuffles them, repeatably.
        seed: of the shuffle.

    Raises ValueError for an unknown order, or numbers that make no sense.
    """
    if not ranks_per_node or min(ranks_per_node) < 1:
        raise ValueError(f"nodes need at least one rank each, not {list(ranks_per_node)}")
    blocks = [
        [(node, local) for local in range(count)] for node, count in enumerate(ranks_per_node)
    ]
    flat = [place for block in blocks for place in block]
    device = {place: number for number, place in enumerate(flat)}
    if order == "cyclic":
        flat.sort(key=lambda place: (place[1], place[0]))
    elif order == "random":
        # Shuffled, but local ranks rise with the rank, as every launcher has it.
        nodes = [node for node, _ in flat]
        random.Random(seed).shuffle(nodes)
        locals_of = [itertools.count() for _ in ranks_per_node]
        flat = [(node, next(locals_of[node])) for node in nodes]
    elif order != "block":
        raise ValueError(f"unknown order {order!r}; known: {', '.join(ORDERS)}")
    return [Seat(node, local, device[node, local]) for node, local in flat]


def parse_rate(text: str) -> float:
    """Bits per second of "1gbit", "250mbit" or "64000"; ValueError for anything else."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no rate: write 250mbit or 1gbit")
    return float(match.group(1)) * _UNITS_BPS[match.group(2).lower()]


def parse_delay(text: str) -> float:
    """Seconds of "1ms", "500us" or "0s"; ValueError for anything else."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no time: write 1ms or 500us")
    return float(match.group(1)) * _UNITS_S[match.group(2).lower()]
