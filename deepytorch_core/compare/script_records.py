"""Make records of `deepytorch bench scripts`, which runs public scripts stock and with ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepytorch_core.base.provenance import Record, provenance
from deepytorch_core.compare.clock import quartiles
from deepytorch_core.compare.result import STOCK, ArmVerdict, Sample, judge
from deepytorch_core.compare.script_rates import Rates, told

FIRST = "deepytorch"
"""This arm begins with an empty profile and empty caches."""
SECOND = "deepytorch, again"
"""This arm begins with what the first run has kept."""
ARMS: Mapping[str, str] = {"stock": STOCK, "ours": FIRST, "second": SECOND}
"""Fields of an arm begin with its key here."""
MOST_LOSSES = 40
"""A record keeps losses of so many steps, evenly spaced."""
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Names a script in a record: see `deepytorch.workloads.scripts`."""

    script: str
    repository: str
    script_commit: str
    arguments: tuple[str, ...]
    size: str
    goal: float
    ranks: int = 1


def record_of(
    origin: Origin,
    samples: Sequence[Sample],
    remarks: Sequence[str] = (),
    *,
    rates: Rates | None = None,
) -> Record:
    """Make the fields `SCRIPT_FIELDS` of `record` from a clocked run or more of each arm.

    The losses of all runs are of the same steps.
    """
    rates = rates or Rates()
    runs = {name: [sample for sample in samples if sample.arm == arm] for name, arm in ARMS.items()}
    verdicts = {name: judge(samples, ARMS[name]) for name in ("ours", "second")}
    steps = {name: [seconds for run in runs[name] for seconds in run.block_s] for name in ARMS}
    record: Record = {
        "bench": "scripts",
        **vars(origin),
        "arguments": list(origin.arguments),
        "device": runs["stock"][0].device,
        **{
            f"{name}_ms": _rounded(1e3 * quartile for quartile in quartiles(steps[name]))
            for name in ARMS
        },
        **_speedup("", steps["stock"], steps["ours"]),
        **_speedup("second_", steps["stock"], steps["second"]),
        "num_steps": min(map(len, steps.values())),
        "rounds": len(runs["stock"]),
    }
    for name in ARMS:
        record |= _of_run(name, runs[name][0])
    return {
        **record,
        "tokens": rates.of_arms({name: runs[name] for name in ARMS}),
        "peer": rates.of_peer(),
        **_losses(runs, verdicts),
        **_switched_on(runs),
        "baseline": STOCK,
        "remarks": [*remarks, *_tried(runs)],
        **provenance(),
    }


def _tried(runs: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Name what our runs were too short for: their last steps are not those of a longer run."""
    return [
        f"{ARMS[name]}: {trial['what']} was still being tried at the end"
        for name in ("ours", "second")
        for trial in runs[name][0].undecided
        if trial["is_begun"]
    ]


def _speedup(prefix: str, stock_s: Sequence[float], our_s: Sequence[float]) -> Record:
    """Return the ratio of medians; its spread is from nearer quartiles to farther ones."""
    low, median, high = quartiles(stock_s)
    our_low, our_median, our_high = quartiles(our_s)
    return {
        f"{prefix}speedup": round(median / our_median, _DIGITS),
        f"{prefix}speedup_spread": _rounded((low / our_high, high / our_low)),
    }


def _of_run(name: str, sample: Sample) -> Record:
    """Name the findings of the clock of an arm's first run."""
    clock = sample.clock or {}
    peak = sample.peak_bytes
    return {
        f"{name}_busy": _round(clock.get("busy_share")),
        f"{name}_kernels_per_step": _round(clock.get("kernels_per_step")),
        f"{name}_first_step_s": _round(clock.get("first_step_s")),
        f"{name}_to_steady_s": _round(clock.get("to_steady_s")),
        f"{name}_steady_from": clock.get("steady_from"),
        f"{name}_longest_s": _round(clock.get("longest_s")),
        f"{name}_peak_gib": None if peak is None else round(peak / 2**30, 3),
    }


def _losses(runs: Mapping[str, Sequence[Sample]], verdicts: Mapping[str, ArmVerdict]) -> Record:
    compared = runs["stock"][0].steps
    every = max(1, compared // MOST_LOSSES)
    numbers = range(0, compared, every)
    apart = [
        verdict.losses.apart for verdict in verdicts.values() if verdict.losses.apart is not None
    ]
    known = [
        verdict.losses.relative
        for verdict in verdicts.values()
        if verdict.losses.relative is not None
    ]
    check = apart[0] if apart else "agree" if known else "no loss was seen"
    return {
        "compared_steps": compared,
        "loss_steps": [number + 1 for number in numbers],
        **{
            f"{name}_losses": [_finite(runs[name][0].losses[number]) for number in numbers]
            for name in ARMS
        },
        "loss_difference": _finite(max(known)) if known else None,
        "loss_check": check,
        "wrong": int(bool(apart)),
    }


def _switched_on(runs: Mapping[str, Sequence[Sample]]) -> Record:
    first, second = runs["ours"][0], runs["second"][-1]
    return {
        "kept": first.kept,
        "second_kept": second.kept,
        "seams": list(first.seams),
        "decisions": [decision.strip() for decision in first.decisions],
        "second_decisions": [decision.strip() for decision in second.decisions],
    }


def line(record: Record) -> str:
    """Say in a line how one script fared."""
    from deepytorch_core.bench.record import claimed

    low, high = record["speedup_spread"]
    gain = f"{record['speedup']:.2f}x ({low:.2f}-{high:.2f}), again {record['second_speedup']:.2f}x"
    if not is_steady(record):
        gain = f"{gain}, not steady yet (raise --seconds)"
    elif any("still being tried" in remark for remark in record["remarks"]):
        gain = f"{gain}, still being tried (raise --seconds)"
    name = record["script"] if record["ranks"] == 1 else f"{record['script']} x {record['ranks']}"
    rate = told(record)
    return (
        f"{name:<28} {record['stock_ms'][1]:>9.2f} ms stock "
        f"{record['ours_ms'][1]:>9.2f} ours {record['second_ms'][1]:>9.2f} again: "
        f"{claimed(record, gain)}; {rate}{_busy(record)}steady after {_after(record)}; "
        f"{record['kept']} kept; losses: {record['loss_check']}"
    )


def is_steady(record: Record) -> bool:
    """Tell whether the runs of all arms came to steady steps."""
    return all(record[f"{name}_steady_from"] is not None for name in ARMS)


def _busy(record: Record) -> str:
    shares = [record[f"{name}_busy"] for name in ("stock", "second")]
    if None in shares:
        return ""
    return f"GPU busy {shares[0]:.0%}, ours {shares[1]:.0%}; "


def _after(record: Record) -> str:
    times = [record[f"{name}_to_steady_s"] for name in ("ours", "second")]
    return ", again ".join(
        "more than the run" if seconds is None else f"{seconds:.1f} s" for seconds in times
    )


def summary(records: Sequence[Record]) -> str:
    """Sum up the scripts whose losses agree and whose steps came to be steady."""
    records = [record for record in records if not record["wrong"] and is_steady(record)]
    if not records:
        return "no script has the losses of stock and steady steps: no speed-up is claimed"
    first = statistics.geometric_mean(float(record["speedup"]) for record in records)
    second = statistics.geometric_mean(float(record["second_speedup"]) for record in records)
    worst = min(records, key=lambda record: float(record["second_speedup"]))
    return (
        f"{len(records)} scripts: {first:.2f}x of stock, {second:.2f}x again (geometric means); "
        f"the least again {worst['second_speedup']:.2f}x ({worst['script']})"
    )


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, _DIGITS) for value in values]


def _round(value: Any) -> float | None:
    return None if value is None else round(float(value), _DIGITS)


def _finite(value: float | None) -> float | None:
    """Return the value as JSON has it: None for infinity and what is no number."""
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    return float(f"{value:.7g}")
