"""Holds what is known of the link between two nodes, and the file that keeps it between runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch_core.base.console import say_once
from deepytorch_core.base.file_permissions import UntrustedError, opened_data

FLOWS = (1, 2, 4, 8)
"""How many TCP connections at once the probe measures."""

_VERSION = 1
_KEPT_S = 7 * 86400.0
_ENOUGH = 0.85  # of the best rate: more flows than that needs are for nothing
_CAP_SHOWS = 1.5  # two flows carry that much more than one
_CPU_BOUND = 0.8  # of a core


@dataclass(frozen=True)
class Link:
    """One direction of the link between two nodes.

    Attributes:
        rates_bps: bits per second of so many TCP connections together, as `FLOWS`.
        round_trip_s: of a byte there and back, the median.
        busy_cores: cores that one connection kept busy, at the busier end.
        free_cores: cores per rank of a node, the poorer one's.
    """

    rates_bps: tuple[float, ...]
    round_trip_s: float
    busy_cores: float
    free_cores: float

    @property
    def rate_bps(self) -> float:
        """The best of all rates."""
        return max(self.rates_bps)

    @property
    def flow_cap_bps(self) -> float | None:
        """The limit of one connection; None if it has none, or a core limits it."""
        capped = self.rates_bps[1] > _CAP_SHOWS * self.rates_bps[0]
        return self.rates_bps[0] if capped and self.busy_cores < _CPU_BOUND else None

    @property
    def flows_needed(self) -> int:
        """The fewest connections that carry what the link can."""
        enough = _ENOUGH * self.rate_bps
        return next(
            flows for flows, rate in zip(FLOWS, self.rates_bps, strict=True) if rate >= enough
        )

    @property
    def bytes_in_flight(self) -> float:
        """Bandwidth times delay."""
        return self.rate_bps / 8 * self.round_trip_s

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Link:
        """Raises ValueError, KeyError or TypeError for what `to_dict` did not write."""
        rates = tuple(float(rate) for rate in fields["rates_bps"])
        if len(rates) != len(FLOWS) or min(rates) <= 0:
            raise ValueError("rates_bps is not what this release measures")
        others = {
            field.name: float(fields[field.name])
            for field in dataclasses.fields(cls)
            if field.name != "rates_bps"
        }
        return cls(rates_bps=rates, **others)

    def __str__(self) -> str:
        cap = self.flow_cap_bps
        return (
            f"{self.rate_bps / 1e9:.3g} Gbit/s"
            + (f", {cap / 1e9:.3g} Gbit/s a connection" if cap is not None else "")
            + f", {self.round_trip_s * 1e6:.0f} us round trip"
        )


def worst(links: Sequence[Link]) -> Link:
    """The slowest in each respect: what holds for every pair of nodes."""
    return Link(
        rates_bps=tuple(min(column) for column in zip(*(link.rates_bps for link in links))),  # noqa: B905
        round_trip_s=max(link.round_trip_s for link in links),
        busy_cores=max(link.busy_cores for link in links),
        free_cores=min(link.free_cores for link in links),
    )


def recall(path: Path, key: str) -> Link | None:
    """Return what the file knows of this pair of machines; None when nothing, or nothing recent."""
    entry = _read(path).get(key, {})
    try:
        if time.time() - entry["measured_at"] > _KEPT_S:
            return None
        return Link.from_dict(entry["link"])
    except (KeyError, TypeError, ValueError):
        return None


def latest(path: Path) -> Link | None:
    """Return what was measured last, of any pair; None when nothing recent is known."""
    known = _read(path)
    found = [
        (entry["measured_at"], link) for key, entry in known.items() if (link := recall(path, key))
    ]
    return max(found, key=lambda pair: float(pair[0]))[1] if found else None


def remember(path: Path, key: str, link: Link) -> None:
    """Adds the pair to the file; does nothing where that cannot be written."""
    with contextlib.suppress(OSError):
        links = _read(path)
        links[key] = {"measured_at": time.time(), "link": link.to_dict()}
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with open(descriptor, "w") as file:
            json.dump({"version": _VERSION, "links": links}, file, indent=1)
        os.replace(name, path)  # whole or not at all, for readers beside us


def _read(path: Path) -> dict[str, Any]:
    try:
        with opened_data(path) as file:
            found = json.load(file)
    except UntrustedError as error:
        say_once(f"what is known of the network is ignored: {error}", level="warning")
        return {}
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        return {}
    links = found.get("links")
    return links if isinstance(links, dict) else {}
