"""The training loop does not wait for its data."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.base import config
from deepytorch_core.doctor.finding import Finding, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine

_STALLED = 0.05
_ENOUGH_BATCHES = 20


@dataclass(frozen=True)
class Loader:
    """DataLoaders of the same settings, as a run's report has them."""

    batches: int
    elapsed_s: float
    waited_s: float
    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool


@dataclass(frozen=True)
class DataFacts:
    """Loaders of a run, None without a report, and the CPUs that each of its ranks has."""

    loaders: tuple[Loader, ...] | None
    cpus: int
    has_gpu: bool = False


def gather(machine: Machine) -> DataFacts:
    launched = config.launched(machine.environment)
    ranks = (launched.local_size or 1) if launched else max(1, len(machine.topology.gpus))
    cpus = max(1, machine.topology.cores.usable // ranks)
    loaders = None
    if machine.report is not None:
        entries = machine.report.get("loaders")
        loaders = tuple(Loader(**entry) for entry in entries) if isinstance(entries, list) else ()
    return DataFacts(loaders, cpus, bool(machine.topology.gpus))


def judge(facts: DataFacts) -> list[Finding]:
    if facts.loaders is None:
        text = "no run's report: json.dump(deepytorch.report().to_dict(), file) at its end, then "
        return [not_here(text + "deepytorch doctor --report FILE")]
    told = [
        entry for entry in facts.loaders if entry.batches >= _ENOUGH_BATCHES and entry.elapsed_s > 0
    ]
    if not told:
        return [not_here(f"the report has no DataLoader of {_ENOUGH_BATCHES} batches or more")]
    findings = []
    for loader in told:
        share = loader.waited_s / loader.elapsed_s
        if share <= _STALLED:
            continue
        text = f"{share:.0%} of the time waits for data ({loader.num_workers} workers, "
        text += f"{loader.waited_s / loader.batches * 1e3:.1f} ms a batch)"
        findings.append(warn(text, _remedy(loader, facts)))
    if findings:
        return findings
    worst = max(entry.waited_s / entry.elapsed_s for entry in told)
    return [okay(f"at most {worst:.1%} of the time waits for data")]


def _remedy(loader: Loader, facts: DataFacts) -> str:
    """The first of these that is not done yet."""
    if loader.num_workers == 0:
        workers = max(1, min(4, facts.cpus))
        return f"DataLoader(..., num_workers={workers}, persistent_workers=True)"
    if facts.has_gpu and not loader.pin_memory:
        return "DataLoader(..., pin_memory=True), and batch.to(device, non_blocking=True)"
    if not loader.persistent_workers:
        return "DataLoader(..., persistent_workers=True)"
    if loader.num_workers < facts.cpus:
        return f"DataLoader(..., num_workers={min(facts.cpus, 2 * loader.num_workers)})"
    factor = 2 * (loader.prefetch_factor or 2)
    return f"DataLoader(..., prefetch_factor={factor}), or less work in the dataset for each item"
