"""Percentiles of step times, and the line that shows them."""

import statistics
from collections.abc import Mapping, Sequence

PERCENTILES = (50, 75, 90, 95)


def percentiles(times_us: Sequence[float]) -> dict[str, float]:
    """`PERCENTILES` of the times by name, interpolated linearly."""
    if len(times_us) == 1:
        return {f"p{p}": times_us[0] for p in PERCENTILES}
    cuts = statistics.quantiles(times_us, n=100, method="inclusive")
    return {f"p{p}": cuts[p - 1] for p in PERCENTILES}


def layout(machines: int, ranks_per_machine: int | str, device: str) -> str:
    """`1M/8G`: machines and GPUs on each, "4+2" where they differ; R for G is ranks on CPUs."""
    return f"{machines}M/{ranks_per_machine}{'G' if device == 'cuda' else 'R'}"


def line(
    world_size: int,
    what: str,
    *,
    device: str,
    times_us: Mapping[str, float],
    samples_per_s: Mapping[str, float],
) -> str:
    """`8 GPUs -- 1M/8G: p50: 0.073s 440/s p75: ...`, the form that ACSpeed made known.

    Args:
        world_size: ranks that took part.
        what: their `layout`, or what else is said of them ("no ddp").
        device: "cuda" or "cpu".
        times_us: percentiles of a step in microseconds, by name.
        samples_per_s: one rank's samples per second at each of them.
    """
    noun = "GPUs" if device == "cuda" else "ranks"
    parts = [
        f"{name}: {time / 1e6:.3f}s {samples_per_s[name]:.0f}/s" for name, time in times_us.items()
    ]
    return f"{world_size} {noun} -- {what}: " + " ".join(parts)
