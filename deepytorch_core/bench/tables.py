"""Results in the README and in docs/results.md, generated from docs/results/*.jsonl.

`python -m deepytorch_core.bench.tables --check|--write README.md [--results docs/results]` compares
or replaces what stands between markers; --check ends with status 1 when it is stale. The first
marker of a pair may name the benchmarks that are shown there, else all are.
"""

import argparse
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepytorch_core.bench.job import format_size
from deepytorch_core.bench.record import (
    COMPILE_FIELDS,
    DDP_FIELDS,
    PARTS_OF_DDP,
    SCRIPT_FIELDS,
    TRAIN_FIELDS,
    WORKLOAD_FIELDS,
    Record,
    claimed,
    describe_emulated,
    describe_rate,
    read_records,
)

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"
_SECTION = re.compile(r"<!-- results:begin((?: \w+)*) -->\n.*?<!-- results:end -->", re.DOTALL)
_MARKER = re.compile(r"<!-- results:(begin|end)\b")

# Columns of the table, where measured: the README shows the shape, the records hold every size.
COLUMN_BYTES = tuple(size << 10 for size in (1, 16, 64, 1024, 4096, 16384, 65536))

# What a table of collectives shows.
NEEDED_FIELDS = (
    *("op", "bytes", "dtype", "world_size", "registered", "baseline", "speedup"),
    *("speedup_spread", "wrong", "machine", "versions", "commit"),
)

# The tables show nothing of the rest, which older records don't have.
NEEDED_OF_TRAIN = tuple(one for one in TRAIN_FIELDS if one not in ("round_speedups", "emulated"))
NEEDED_OF_COMPILE = tuple(one for one in COMPILE_FIELDS if one != "warmup_phases_s")
_OF_OURS_AND_STOCK = {
    *("engine", "stock", "stock_per_s", "ours_per_s", "speedup", "speedup_spread"),
    *("loss_max_diff", "stock_peak_gib", "ours_peak_gib"),
}
NEEDED_OF_WORKLOAD = tuple(one for one in WORKLOAD_FIELDS if one not in _OF_OURS_AND_STOCK)

# What is true of `bench ddp`'s older records, which don't say so.
_OLDER_DDP: Record = {
    **{"part": "collectives", "precision": "fp32", "image_size": None},
    **{"choices": {}, "emulated": None},
}
NEEDED_OF_DDP = tuple(one for one in DDP_FIELDS if one not in _OLDER_DDP)

# What a table of collectives on one machine's GPUs shows beyond that.
GPU_FIELDS = (
    *NEEDED_FIELDS,
    *("device", "cuda_graph", "algorithm", "time_us", "baseline_time_us", "cpu_us"),
    "baseline_cpu_us",
)

NEEDED_OF_NCCL = ("world_size", "rows", "choices", "machine", "versions", "commit")

_Row = tuple[str, str, int, str]  # label, dtype, world_size, baseline


def load(folder: str | Path) -> dict[str, list[Record]]:
    """The records of each *.jsonl file in `folder` by file name, sorted by name."""
    return {path.name: read_records(path) for path in sorted(Path(folder).glob("*.jsonl"))}


def render(
    files: Mapping[str, Sequence[Record]],
    *,
    kinds: Collection[str] = (),
    folder: str = "docs/results",
) -> str:
    """Markdown for all records of `kinds`, or of all, a table for each file; "" without records.

    Args:
        files: the records by file name.
        kinds: of "collectives" (on CPUs or emulated), "gpu", "ddp", "train", "compile", "workload",
            "parts" (workloads without the arm that has all of ours), "nccl", "scripts".
        folder: where links find the files.

    Raises ValueError for a record of another kind than `bench` writes: a record that no table shows
    would look like a result that was left out. And for a kind that does not exist.
    """
    parts: list[str] = []
    renderers = {
        "collectives": (NEEDED_FIELDS, _render_collectives),
        "gpu": (GPU_FIELDS, _render_gpu),
        "ddp": (NEEDED_OF_DDP, _render_ddp),
        "train": (NEEDED_OF_TRAIN, _render_train),
        "compile": (NEEDED_OF_COMPILE, _render_compile),
        "workload": (NEEDED_OF_WORKLOAD, _render_workload),
        "parts": (NEEDED_OF_WORKLOAD, _render_parts),
        "nccl": (NEEDED_OF_NCCL, _render_nccl),
        "scripts": (SCRIPT_FIELDS, _render_scripts),
    }
    unknown = [kind for kind in kinds if kind not in renderers]
    if unknown:
        raise ValueError(f"there are no results of {unknown[0]}: expected {', '.join(renderers)}")
    for name, records in files.items():
        for kind, (fields, render_group) in renderers.items():
            group = [record for record in records if _kind(record) == kind]
            _refuse_incomplete(name, group, fields)
            if group and (not kinds or kind in kinds):
                parts.append(render_group(f"{folder}/{name}", group))
    return "\n\n".join(parts)


def replace(text: str, files: Mapping[str, Sequence[Record]], folder: str = "docs/results") -> str:
    """`text` with tables between its markers; ValueError unless they come in pairs."""
    pairs = len(_SECTION.findall(text))
    if not pairs or len(_MARKER.findall(text)) != 2 * pairs:
        raise ValueError(f"the text needs {BEGIN} and, after each, one {END}")

    def section(match: re.Match[str]) -> str:
        table = render(files, kinds=match[1].split(), folder=folder)
        body = f"{table}\n" if table else ""
        return f"<!-- results:begin{match[1]} -->\n{body}{END}"

    return _SECTION.sub(section, text)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m deepytorch_core.bench.tables")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", metavar="FILE", type=Path, help="fail when FILE is stale")
    action.add_argument("--write", metavar="FILE", type=Path, help="bring FILE up to date")
    parser.add_argument("--results", metavar="FOLDER", type=Path, default=Path("docs/results"))
    options = parser.parse_args(arguments)
    path: Path = options.write or options.check
    try:
        text = path.read_text(encoding="utf-8")
        folder = os.path.relpath(options.results, path.parent)
        fresh = replace(text, load(options.results), folder)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 1
    if options.write:
        path.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        command = f"python -m deepytorch_core.bench.tables --write {path}"
        sys.stderr.write(f"{path}: the results differ from {options.results}; run {command}\n")
        return 1
    return 0


def _kind(record: Record) -> str:
    """Which table shows the record: that of its benchmark, and of its machine for collectives."""
    on_gpus = record.get("device") == "cuda" and not record.get("emulated")
    if record.get("bench") == "workload" and "ours" not in record.get("arms", ("ours",)):
        return "parts"
    return str(record.get("bench") or ("gpu" if on_gpus else "collectives"))


def _refuse_incomplete(name: str, records: Sequence[Record], fields: Iterable[str]) -> None:
    for number, record in enumerate(records, start=1):
        missing = [field for field in fields if field not in record]
        if missing:
            raise ValueError(f"{name}, record {number}: no table shows it: lacks {missing}")


def _render_collectives(name: str, records: Sequence[Record]) -> str:
    cells: dict[_Row, dict[int, Record]] = {}
    for record in records:  # a later run of the same case replaces an earlier one
        row = (_label(record), record["dtype"], record["world_size"], record["baseline"])
        cells.setdefault(row, {})[_column(record)] = record
    sizes = {size for line in cells.values() for size in line}
    columns = [size for size in COLUMN_BYTES if size in sizes]
    # A row shows something: where it has no usual size, its own ones.
    columns += {size for line in cells.values() if not line.keys() & {*columns} for size in line}
    columns.sort()
    lines = [
        _caption(name, [record for line in cells.values() for record in line.values()]),
        "",
        _line(["operation", "dtype", "ranks", "against", *(_heading(size) for size in columns)]),
        _line(["---", "---", "---:", "---", *("---:" for _ in columns)]),
    ]
    for (label, dtype, world_size, baseline), line in cells.items():
        values = [_cell(line.get(size)) for size in columns]
        lines.append(_line([label, dtype, str(world_size), baseline, *values]))
    return "\n".join(lines)


def _label(record: Record) -> str:
    marks = [
        *(["registered"] if record["registered"] else []),
        *(["direct call"] if record.get("direct") else []),
        *(["beside matrix products"] if record.get("compute_us") else []),
        *(["size per rank"] if _is_per_rank(record) else []),
        *([describe_emulated(record["emulated"])] if record.get("emulated") else []),
    ]
    return f"{record['op']} ({', '.join(marks)})" if marks else str(record["op"])


def _column(record: Record) -> int:
    return int(record["bytes_per_rank"] if _is_per_rank(record) else record["bytes"])


def _is_per_rank(record: Record) -> bool:
    """Asked for by one rank's part, where that is another number than nccl-tests' size."""
    return bool(record.get("per_rank")) and record["bytes_per_rank"] != record["bytes"]


def _render_gpu(name: str, records: Sequence[Record]) -> str:
    """Every size has a column, every cell both times: claims differ from size to size."""
    cells: dict[tuple[str, str, int, str, bool], dict[int, Record]] = {}
    for record in records:  # a later run of the same case replaces an earlier one
        row = (_label(record), record["dtype"], record["world_size"], record["baseline"])
        cells.setdefault((*row, record["cuda_graph"]), {})[_column(record)] = record
    columns = sorted({size for line in cells.values() for size in line})
    lines = [
        _caption(name, [record for line in cells.values() for record in line.values()])
        + " Below it the microseconds of a call, ours : theirs, and the algorithm; eager calls "
        "also with the CPU's microseconds.",
        "",
        _line(["operation", "dtype", "GPUs", "against", "timing", *map(_heading, columns)]),
        _line(["---", "---", "---:", "---", "---", *("---:" for _ in columns)]),
    ]
    for (label, dtype, world_size, baseline, in_graph), line in cells.items():
        timing = "CUDA graph" if in_graph else "eager"
        values = [_gpu_cell(line.get(size)) for size in columns]
        lines.append(_line([label, dtype, str(world_size), baseline, timing, *values]))
    return "\n".join(lines)


def _gpu_cell(record: Record | None) -> str:
    if record is None:
        return ""
    parts = [_cell(record), f"{_us(record['time_us'])} : {_us(record['baseline_time_us'])}"]
    if record["cpu_us"] is not None:
        parts.append(f"CPU {_us(record['cpu_us'])} : {_us(record['baseline_cpu_us'])}")
    return "<br>".join([*parts, record["algorithm"]])


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _render_ddp(name: str, records: Sequence[Record]) -> str:
    # A later run of the same case replaces an earlier one.
    case = (
        *("model", "part", "parameters", "precision", "image_size", "batch_size"),
        *("world_size", "device", "registered", "baseline"),
    )
    latest = {
        (*(record[field] for field in case), str(record["emulated"])): record
        for record in ({**_OLDER_DDP, **record} for record in records)
    }
    lines = [
        _caption(name, list(latest.values()), wrong="runs with differing losses"),
        "",
        _line(["DDP training", "ranks", "reduced per step", "against", "steps/s", "losses"]),
        _line(["---", "---:", "---:", "---", "---:", "---"]),
    ]
    for record in latest.values():
        lines.append(
            _line(
                [
                    _training_label(record),
                    str(record["world_size"]),
                    f"{record['bytes_per_step'] / 1e6:.1f} MB",
                    record["baseline"],
                    _cell(record),
                    _losses(record),
                ]
            )
        )
    return "\n".join(lines)


def _training_label(record: Record) -> str:
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


def _place(record: Record) -> str:
    """Of a label: on which emulated nodes, if any."""
    return f", {describe_emulated(record['emulated'])}" if record.get("emulated") else ""


def _render_train(name: str, records: Sequence[Record]) -> str:
    # A later run of the same case replaces an earlier one.
    case = ("framework", "parameters", "batch_size", "world_size", "device", "baseline")
    latest = {
        (*(record[field] for field in case), str(record.get("emulated"))): record
        for record in records
    }
    lines = [
        _caption(name, list(latest.values()), wrong="runs with differing losses"),
        "",
        _line(["training", "ranks", "batch", "against", "steps/s", "native calls", "losses"]),
        _line(["---", "---:", "---:", "---", "---:", "---:", "---"]),
    ]
    for record in latest.values():
        calls = record["native_calls"] + record["delegated_calls"]
        lines.append(
            _line(
                [
                    f"{record['framework']} ({record['framework_version']}), "
                    f"{record['parameters'] / 1e6:.1f} M" + _place(record),
                    str(record["world_size"]),
                    str(record["batch_size"]),
                    record["baseline"],
                    _cell(record),
                    f"{100 * record['native_calls'] / max(1, calls):.0f}%",
                    _losses(record),
                ]
            )
        )
    return "\n".join(lines)


def _render_workload(name: str, records: Sequence[Record]) -> str:
    latest = _latest_workloads(records, "the plain and the tuned arm")
    lines = [
        _caption(name, latest, wrong="runs with differing losses"),
        "",
        _line(["workload", "ranks", "plain", "ours", "against plain", "against tuned", "claim"]),
        _line(["---", "---:", "---:", "---:", "---:", "---:", "---:"]),
    ]
    for record in latest:
        claim = f"{record['claim']:.2f}x" if record["claim"] else ""
        ratios = [
            claimed(record, _ratio_cell(record[key])) for key in ("against_plain", "against_tuned")
        ]
        rates = [describe_rate(record, arm) for arm in ("plain", "ours")]
        lines.append(_line([_title(record), str(record["world_size"]), *rates, *ratios, claim]))
    return "\n".join(lines)


def _render_parts(name: str, records: Sequence[Record]) -> str:
    latest = _latest_workloads(records, "the plain arm")
    lines = [
        _caption(name, latest, wrong="runs with differing losses"),
        "",
        _line(["workload", "ranks", "plain", "our collectives only", "our compute only"]),
        _line(["---", "---:", "---:", "---:", "---:"]),
    ]
    for record in latest:
        ratios = [
            claimed(record, _ratio_cell(record[key]))
            for key in ("collectives_only", "compute_only")
        ]
        cells = [_title(record), str(record["world_size"]), describe_rate(record, "plain"), *ratios]
        lines.append(_line(cells))
    return "\n".join(lines)


def _latest_workloads(records: Sequence[Record], baseline: str) -> list[Record]:
    case = ("workload", "scale", "world_size", "device")
    latest = {
        (*(record[field] for field in case), str(record["emulated"]), record.get("together")): {
            **record,
            "baseline": baseline,
        }
        for record in records
    }
    return list(latest.values())


def _title(record: Record) -> str:
    title = str(record["title"]) + ("" if record["scale"] == "full" else f" ({record['scale']})")
    if record["layers"] != record["all_layers"]:
        title += f", {record['layers']} of {record['all_layers']} layers"
    if record.get("together"):
        title += "; both arms in each process"
    if record["emulated"]:
        title += f"; {describe_emulated(record['emulated'])}"
    return title


def _ratio_cell(ratio: Sequence[float] | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio[0]:.2f}x ({ratio[1]:.2f}-{ratio[2]:.2f})"


def _render_compile(name: str, records: Sequence[Record]) -> str:
    latest = {
        (record["workload"], record["device"]): {**record, "baseline": record["stock"]}
        for record in records
    }
    lines = [
        _caption(name, list(latest.values()), wrong="runs with differing losses"),
        "",
        _line(["training", "batch", "against eager", "torch.compile", "warm-up", "theirs", "kept"]),
        _line(["---", "---:", "---:", "---:", "---:", "---:", "---"]),
    ]
    for record in latest.values():
        lines.append(
            _line(
                [
                    f"{record['workload']}, {record['parameters'] / 1e6:.1f} M",
                    str(record["batch_size"]),
                    _cell(record),
                    f"{record['plain_speedup']:.2f}x",
                    f"{record['warmup_s']:.0f} s",
                    f"{record['plain_warmup_s']:.0f} s",
                    record["kept"],
                ]
            )
        )
    return "\n".join(lines)


def _render_nccl(name: str, records: Sequence[Record]) -> str:
    latest = {
        (record["world_size"], str(record.get("emulated"))): {
            **record,
            **{"baseline": "NCCL's own choice", "wrong": 0},  # wrong results end the measurement
        }
        for record in records
    }
    lines = [
        _caption(name, list(latest.values())),
        "",
        _line(["operation", "ranks", "size", "NCCL's own", "the fastest other", "chosen"]),
        _line(["---", "---:", "---:", "---:", "---", "---"]),
    ]
    for record in latest.values():
        place = f" ({describe_emulated(record['emulated'])})" if record.get("emulated") else ""
        chosen = {(one["collective"], one["first_bytes"]) for one in record["choices"]}
        for case in dict.fromkeys((row["op"], row["bytes"]) for row in record["rows"]):
            rows = [row for row in record["rows"] if (row["op"], row["bytes"]) == case]
            best = max(rows, key=lambda row: float(row["speedup"]))
            own = min(float(row["baseline_time_us"]) for row in rows)
            ratio = _ratio_cell([best["speedup"], *best["speedup_spread"]])
            cells = [case[0] + place, str(record["world_size"]), format_size(case[1])]
            cells += [f"{own:,.0f} us", f"{best['algorithm']} {best['protocol']} {ratio}"]
            lines.append(_line([*cells, "yes" if case in chosen else "no"]))
    return "\n".join(lines)


def _render_scripts(name: str, records: Sequence[Record]) -> str:
    latest = {(record["script"], record["size"], record["device"]): record for record in records}
    lines = [
        _caption(name, list(latest.values()), wrong="runs with differing losses"),
        "",
        _line(["script", "stock", "ours", "times", "again", "GPU busy", "steady after", "kept"]),
        _line(["---", "---:", "---:", "---:", "---:", "---:", "---:", "---:"]),
    ]
    for record in latest.values():
        small = "" if record["size"] == "full" else f" ({record['size']})"
        again = [record["second_speedup"], *record["second_speedup_spread"]]
        cells = [f"{record['repository']}: {record['script']}{small}"]
        cells += [f"{record[f'{arm}_ms'][1]:.1f} ms" for arm in ("stock", "ours")]
        cells += [
            _cell(record),
            claimed(record, _ratio_cell(again)),
            _pair(record, "busy", "{:.0%}"),
        ]
        lines.append(_line([*cells, _pair(record, "to_steady_s", "{:.0f} s"), str(record["kept"])]))
    return "\n".join(lines)


def _pair(record: Record, field: str, form: str) -> str:
    """Say how busy the GPU is in stock's and our second run, and when ours were steady."""
    arms = ("stock", "second") if field == "busy" else ("ours", "second")
    values = [record[f"{arm}_{field}"] for arm in arms]
    return ": ".join("?" if one is None else form.format(one) for one in values)


def _losses(record: Record) -> str:
    difference = record["loss_difference"]
    if difference is None:
        return "differ"
    return "equal" if difference == 0 else f"within {difference:.0e}"


def _caption(name: str, records: Sequence[Record], wrong: str = "wrong elements") -> str:
    machines = _distinct(record["machine"]["name"] for record in records)
    baselines = _distinct(record["baseline"] for record in records)
    torches = _distinct(record["versions"]["torch"] for record in records)
    commits = _distinct(record["commit"] for record in records)
    num_wrong = sum(record["wrong"] + record.get("baseline_wrong", 0) for record in records)
    return (
        f"{machines}, torch {torches}, commit {commits}: times faster than {baselines}, in "
        f"brackets the quartiles over neighbouring blocks; {num_wrong} {wrong} "
        f"([{Path(name).name}]({name}))."
    )


def _distinct(values: Iterable[Any]) -> str:
    return " / ".join(dict.fromkeys(str(value) for value in values))


def _heading(num_bytes: int) -> str:
    return format_size(num_bytes) if num_bytes else "no data"


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    low, high = record["speedup_spread"]
    return claimed(record, f"**{_ratio(record['speedup'])}** ({_ratio(low)}-{_ratio(high)})")


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
