"""Tables of published workloads: what `deepytorch bench train --workload` recorded."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from deepytorch_core.base.decisions import is_stock
from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import cells, pairs
from deepytorch_core.bench.record import claimed, describe_emulated, describe_rate

# The thing that a choice was made for begins with one of these; each names the choice's part.
_PARTS: Mapping[str, str] = {
    "padding-free": "no padding",
    "memory format": "channels_last",
    "compile of": "compiled",
    "CUDA graphs": "CUDA graphs",
    "ZeRO-3's weights": "rounding on the GPU",
    "DDP buckets": "buckets",
}
_KERNELS = "fused kernels"
_WRONG = "runs with differing losses"


def headline(files: cells.Files) -> str:
    """A row for each workload with what gives its figures; rates are left out."""
    latest = _latest(files, "the plain and the tuned arm")
    titles = {"workload": "---", "GPUs": "---", "against plain": "---:", "against tuned": "---:"}
    lines = cells.head({**titles, "what was kept": "---"})
    for record in _all(latest):
        row = [_title(record), _gpus(record), *_against(record), kept(record)]
        lines.append(cells.line(row))
    return "\n".join([*lines, "", cells.caption(latest, _WRONG)])


def workloads(files: cells.Files) -> str:
    latest = _latest(files, "the plain and the tuned arm")
    origins = cells.Provenance(_all(latest))
    titles = {"workload": "---", "ranks": "---:", "plain": "---:", "ours": "---:"}
    titles |= {"against plain": "---:", "against tuned": "---:", "claim": "---:"}
    lines = cells.head({**titles, "what was kept": "---", **origins.titles})
    for record in _all(latest):
        claim = f"{record['claim']:.2f}x" if record["claim"] else ""
        rates = [describe_rate(record, arm) for arm in ("plain", "ours")]
        row = [_title(record), str(record["world_size"]), *rates, *_against(record), claim]
        lines.append(cells.line([*row, kept(record), *origins.of([record])]))
    return "\n".join([*lines, "", cells.caption(latest, _WRONG)])


def parts(files: cells.Files) -> str:
    """Workloads that were trained with a half of ours, and not with all of it."""
    latest = _latest(files, "the plain arm")
    origins = cells.Provenance(_all(latest))
    titles = {"workload": "---", "ranks": "---:", "plain": "---:"}
    titles |= {"our collectives only": "---:", "our compute only": "---:"}
    lines = cells.head({**titles, **origins.titles})
    for record in _all(latest):
        ratios = [
            claimed(record, cells.ratio(pairs.of_record(record, "plain", arm)))
            for arm in ("ours-collectives", "ours-compute")
        ]
        row = [_title(record), str(record["world_size"]), describe_rate(record, "plain")]
        lines.append(cells.line([*row, *ratios, *origins.of([record])]))
    return "\n".join([*lines, "", cells.caption(latest, _WRONG)])


def kept(record: Record) -> str:
    """Name our parts that were on in the arm's timed steps: "no padding, compiled, fused kernels".

    Native collectives are named where they were a tenth of all or more.
    """
    arm: Mapping[str, Any] = record["arms"].get("ours", {})
    found = []
    for decision in map(ast.literal_eval, arm.get("decisions", ())):  # recorded as they print
        if "what" in decision and not is_stock(decision):
            belongs = (part for begin, part in _PARTS.items() if decision["what"].startswith(begin))
            found.append(next(belongs, _KERNELS))
    calls = arm.get("native_calls", 0), arm.get("delegated_calls", 0)
    if record["world_size"] > 1 and calls[0] >= sum(calls) / 10 > 0:
        found.append(f"{100 * calls[0] / sum(calls):.0f} % of the collectives")
    order = [*_PARTS.values(), _KERNELS]
    unique = sorted(dict.fromkeys(found), key=lambda part: (*order, part).index(part))
    return ", ".join(unique)


def _against(record: Record) -> list[str]:
    return [
        claimed(record, cells.ratio(pairs.of_record(record, arm, "ours")))
        for arm in ("plain", record["tuned"])
    ]


def _gpus(record: Record) -> str:
    gpus = record["machine"].get("gpus") or ["CPU"]
    return f"{record['world_size']}x {gpus[0].removeprefix('NVIDIA ')}"


def _all(files: cells.Files) -> list[Record]:
    return [record for records in files.values() for record in records]


def _latest(files: cells.Files, baseline: str) -> cells.Files:
    """Return the last record of each case; a later run replaces an earlier one."""
    found = {}
    case = ("workload", "scale", "world_size", "device")
    for name, records in files.items():
        latest = {
            (*(record[field] for field in case), str(record["emulated"]), record.get("together")): {
                **record,
                "baseline": baseline,
            }
            for record in records
        }
        found[name] = list(latest.values())
    return found


def _title(record: Record) -> str:
    title = str(record["title"]) + ("" if record["scale"] == "full" else f" ({record['scale']})")
    if record["layers"] != record["all_layers"]:
        title += f", {record['layers']} of {record['all_layers']} layers"
    if record.get("together"):
        title += "; both arms in each process"
    if record["emulated"]:
        title += f"; {describe_emulated(record['emulated'])}"
    return title
