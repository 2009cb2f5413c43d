"""Tables of steps: what `deepytorch bench ddp`, `train`, `compile` and `scripts` recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepytorch_core.base.provenance import Record
from deepytorch_core.bench import cells
from deepytorch_core.bench.cells import Files, Provenance, caption, line
from deepytorch_core.bench.record import PARTS_OF_DDP, claimed, describe_emulated

# This is true of `bench ddp`'s older records, which don't say so.
OLDER_DDP: Record = {
    **{"part": "collectives", "precision": "fp32", "image_size": None},
    **{"choices": {}, "emulated": None},
}
_WRONG = "runs with differing losses"

_DDP_CASE = (
    *("model", "part", "parameters", "precision", "image_size", "batch_size"),
    *("world_size", "device", "registered", "baseline"),
)
_TRAIN_CASE = ("framework", "parameters", "batch_size", "world_size", "device", "baseline")


def ddp(files: Files) -> str:
    older = {name: [{**OLDER_DDP, **record} for record in own] for name, own in files.items()}
    titles = {"DDP training": "---", "ranks": "---:", "reduced per step": "---:"}
    titles |= {"against": "---", "steps/s": "---:", "losses": "---"}
    return _table(_latest(older, _DDP_CASE), titles, _ddp_row)


def _ddp_row(record: Record) -> list[str]:
    return [
        _ddp_label(record),
        str(record["world_size"]),
        f"{record['bytes_per_step'] / 1e6:.1f} MB",
        record["baseline"],
        cells.times(record),
        cells.losses(record),
    ]


def _ddp_label(record: Record) -> str:
    parts = [record["model"], f"{record['parameters'] / 1e6:.1f} M"]
    if record["image_size"]:
        parts += [record["precision"], f"{record['image_size']} px"]
    parts.append(f"batch {record['batch_size']}")
    if record["registered"]:
        parts.append("registered buckets")
    if record["emulated"]:
        parts.append(describe_emulated(record["emulated"]))
    label = ", ".join(parts)
    return f"{label}; ours: {PARTS_OF_DDP[record['part']]}" if record["image_size"] else label


def train(files: Files) -> str:
    titles = {"training": "---", "ranks": "---:", "batch": "---:", "against": "---"}
    titles |= {"steps/s": "---:", "native calls": "---:", "losses": "---"}
    return _table(_latest(files, _TRAIN_CASE), titles, _train_row)


def _train_row(record: Record) -> list[str]:
    calls = record["native_calls"] + record["delegated_calls"]
    place = f", {describe_emulated(record['emulated'])}" if record.get("emulated") else ""
    return [
        f"{record['framework']} ({record['framework_version']}), "
        f"{record['parameters'] / 1e6:.1f} M{place}",
        str(record["world_size"]),
        str(record["batch_size"]),
        record["baseline"],
        cells.times(record),
        f"{100 * record['native_calls'] / max(1, calls):.0f}%",
        cells.losses(record),
    ]


def compiled(files: Files) -> str:
    latest = {
        name: [{**record, "baseline": record["stock"]} for record in own]
        for name, own in _latest(files, ("workload", "device")).items()
    }
    titles = {"training": "---", "batch": "---:", "against eager": "---:"}
    titles |= {"torch.compile": "---:", "warm-up": "---:", "theirs": "---:", "kept": "---"}
    return _table(latest, titles, _compile_row)


def _compile_row(record: Record) -> list[str]:
    return [
        f"{record['workload']}, {record['parameters'] / 1e6:.1f} M",
        str(record["batch_size"]),
        cells.times(record),
        f"{record['plain_speedup']:.2f}x",
        f"{record['warmup_s']:.0f} s",
        f"{record['plain_warmup_s']:.0f} s",
        record["kept"],
    ]


def scripts(files: Files) -> str:
    titles = {"script": "---", "stock": "---:", "ours": "---:", "times": "---:"}
    titles |= {"again": "---:", "GPU busy": "---:", "steady after": "---:", "kept": "---:"}
    files = _latest(files, ("script", "size", "ranks", "device"))
    table = _table(files, titles, _script_row)
    counted = {
        name: [record for record in records if record["tokens"] is not None]
        for name, records in files.items()
    }
    if not any(counted.values()):
        return table
    titles = {"script": "---", "stock": "---:", "ours": "---:", "again": "---:"}
    titles |= {"another way": "---", "of the rate of products": "---:", "GiB": "---:"}
    head = "Real tokens per second of the same scripts, padding left out:"
    return "\n\n".join([table, head, _table(counted, titles, _tokens_row)])


def _script_row(record: Record) -> list[str]:
    how = [record["size"]] if record["size"] != "full" else []
    how += [f"{record['ranks']} ranks"] if record["ranks"] > 1 else []
    small = f" ({', '.join(how)})" if how else ""
    again = [record["second_speedup"], *record["second_speedup_spread"]]
    return [
        f"{record['repository']}: {record['script']}{small}",
        *(f"{record[f'{arm}_ms'][1]:.1f} ms" for arm in ("stock", "ours")),
        f"{cells.times(record)}{_unfinished(record)}",
        claimed(record, cells.ratio(again)),
        _pair(record, "busy", "{:.0%}"),
        _pair(record, "to_steady_s", "{:.0f} s"),
        str(record["kept"]),
    ]


def _unfinished(record: Record) -> str:
    """Name the runs that were too short, for which a longer one may give another ratio."""
    if record["wrong"]:  # no ratio is claimed
        return ""
    words = {"stock": "stock", "ours": "ours", "second": "again"}
    unsteady = [word for arm, word in words.items() if record[f"{arm}_steady_from"] is None]
    said = f", not steady: {', '.join(unsteady)}" if unsteady else ""
    if any("still being tried" in remark for remark in record["remarks"]):
        said += ", still being tried"
    return said


def _tokens_row(record: Record) -> list[str]:
    tokens, peer = record["tokens"], record["peer"]
    other = "not measured"
    if peer is not None and peer["tokens"] is not None:
        other = f"{peer['tokens']['per_s']:,.0f}: {peer['name']}"
    shares = [tokens[arm]["matrix_share"] for arm in ("stock", "second")]
    memory = [record[f"{arm}_peak_gib"] for arm in ("stock", "second")]
    return [
        record["script"],
        *(claimed(record, f"{tokens[arm]['per_s']:,.0f}") for arm in ("stock", "ours", "second")),
        other,
        _joined(shares, "{:.0%}"),
        _joined(memory, "{:.1f}"),
    ]


def _pair(record: Record, field: str, form: str) -> str:
    """Say how busy the GPU is in stock's and our second run, and when ours were steady."""
    arms = ("stock", "second") if field == "busy" else ("ours", "second")
    return _joined([record[f"{arm}_{field}"] for arm in arms], form)


def _joined(values: Sequence[float | None], form: str) -> str:
    return ": ".join("?" if value is None else form.format(value) for value in values)


def _latest(files: Files, case: Sequence[str]) -> Files:
    """Return the last record of each case; a later run replaces an earlier one."""
    found = {}
    for name, records in files.items():
        latest = {
            (*(record[field] for field in case), str(record.get("emulated"))): record
            for record in records
        }
        found[name] = list(latest.values())
    return found


def _table(files: Files, titles: dict[str, str], row: Callable[[Record], list[str]]) -> str:
    records = [record for own in files.values() for record in own]
    origins = Provenance(records)
    lines = cells.head({**titles, **origins.titles})
    lines += [line([*row(record), *origins.of([record])]) for record in records]
    return "\n".join([*lines, "", caption(files, _WRONG)])
