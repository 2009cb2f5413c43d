"""Tell the real tokens per second of a public script, ours beside the fastest other way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepytorch_core.base.provenance import Record
from deepytorch_core.compare.clock import quartiles
from deepytorch_core.compare.result import Sample


@dataclass(frozen=True)
class Rates:
    """Says by what tokens and operations are told.

    Args:
        work: operations for each token and for each pair of tokens of a sequence; None: unknown.
        matrix_rate: the GPU's operations per second in products of matrices; None: not measured.
        peer: the other way's name and further arguments, and its run; None without one.
    """

    work: tuple[float, float] | None = None
    matrix_rate: float | None = None
    peer: tuple[str, tuple[str, ...], Sample] | None = None

    def of_arms(self, runs: Mapping[str, Sequence[Sample]]) -> Record | None:
        """Return the rates of each arm's runs together; None where nobody counts tokens."""
        found = {name: self._of(samples) for name, samples in runs.items()}
        if any(rate is None for rate in found.values()):
            return None
        return {
            "matrix_tflops": None
            if self.matrix_rate is None
            else round(self.matrix_rate / 1e12, 1),
            **{name: rate for name, rate in found.items()},
        }

    def of_peer(self) -> Record | None:
        """Return the other way's rates, step time in milliseconds and memory in GiB."""
        if self.peer is None:
            return None
        name, arguments, sample = self.peer
        peak = sample.peak_bytes
        return {
            "name": name,
            "arguments": list(arguments),
            "ms": [round(1e3 * seconds, 4) for seconds in quartiles(sample.block_s)],
            "busy": (sample.clock or {}).get("busy_share"),
            "peak_gib": None if peak is None else round(peak / 2**30, 3),
            "tokens": self._of([sample]),
        }

    def _of(self, samples: Sequence[Sample]) -> Record | None:
        counts = [(sample.clock or {}).get("tokens") for sample in samples]
        known = [counted for counted in counts if counted is not None]
        if len(known) < len(counts):
            return None
        tokens = sum(counted["tokens"] for counted in known)
        pairs = sum(counted["pairs"] for counted in known)
        seconds = sum(sum(sample.block_s) for sample in samples)
        share = None
        if self.work is not None and self.matrix_rate is not None:
            operations = self.work[0] * tokens + self.work[1] * pairs
            share = round(operations / seconds / self.matrix_rate, 4)
        return {
            "per_s": round(tokens / seconds, 1),
            "per_step": round(tokens / sum(len(sample.block_s) for sample in samples), 1),
            "matrix_share": share,
        }


def told(record: Mapping[str, Any]) -> str:
    """Say a record's rates in a line, before what follows there; "" without any."""
    tokens, peer = record["tokens"], record["peer"]
    if tokens is None:
        return ""
    parts = [f"{tokens[arm]['per_s']:,.0f} {word}" for arm, word in _WORDS.items()]
    if peer is not None and peer["tokens"] is not None:
        parts.append(f"{peer['tokens']['per_s']:,.0f} {peer['name']}")
    share = tokens["second"]["matrix_share"]
    of_rate = "" if share is None else f", {share:.0%} of the rate of products"
    return f"real tokens/s: {', '.join(parts)}{of_rate}; "


_WORDS = {"stock": "stock", "ours": "ours", "second": "again"}
