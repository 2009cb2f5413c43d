"""The compiled adapter for this torch is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepytorch_core.base import distribution
from deepytorch_core.c10d import adapter
from deepytorch_core.doctor.finding import Finding, fail, okay, warn
from deepytorch_core.doctor.machine import Machine


@dataclass(frozen=True)
class AdapterFacts:
    """`path`: the adapter that fits, "" without one; `others`: adapters for other torches, by
    their tags."""

    torch: str
    tag: str
    path: str
    others: tuple[str, ...]
    error: str
    was_slow: bool = False


def gather(machine: Machine) -> AdapterFacts:
    torch = machine.torch
    others = [
        folder.name
        for place in adapter.cache_folders()
        for folder in _entries(place)
        if folder.name.startswith("torch") and folder.is_dir() and folder.name != torch.adapter_tag
    ]
    error = torch.adapter_error or ("" if torch.adapter_tag else torch.error)
    slow = bool(torch.doing)
    return AdapterFacts(torch.version, torch.adapter_tag, torch.adapter, tuple(others), error, slow)


def judge(facts: AdapterFacts) -> list[Finding]:
    if facts.path:
        return [okay(f"for torch {facts.torch}: {facts.path}")]
    if not facts.tag:
        text = f"not looked for: {facts.error or 'torch did not answer'}"
        if facts.was_slow:
            return [warn(text, "deepytorch build   # finds or compiles it")]
        return [fail(text, distribution.REINSTALL)]
    # The tag begins with torch's version: "torch2.13.0-<commit>-<python>-...".
    builds = sorted({tag.partition("-")[0] for tag in facts.others})
    if builds and facts.tag.partition("-")[0] not in builds:
        text = f"compiled for {', '.join(builds)}, but this is torch {facts.torch}"
    elif builds:
        text = f"compiled for torch {facts.torch} with another Python, C library or release of ours"
    else:
        text = f"not compiled yet for torch {facts.torch}"
    return [warn(f"{text}: the first use compiles for a minute", "deepytorch build")]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
