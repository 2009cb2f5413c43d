"""Results in the README and in docs/results.md, generated from docs/results/*.jsonl.

`python -m deepytorch_core.bench.tables --check|--write README.md [--results docs/results]` compares
or replaces what stands between markers; --check ends with status 1 when it is stale. The first
marker of a pair may name the benchmarks that are shown there, else all are, and behind `in` the
files, which then share a table: `<!-- results:begin train in training-2-h200 training-4-h200 -->`.
Charts have markers too, see `deepytorch_core/bench/charts.py`.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from deepytorch_core.base.provenance import Record, read_records
from deepytorch_core.bench import (
    cells,
    charts,
    collective_tables,
    pairs,
    training_tables,
    workload_tables,
)
from deepytorch_core.bench.record import (
    COMPILE_FIELDS,
    DDP_FIELDS,
    SCRIPT_FIELDS,
    TRAIN_FIELDS,
    WORKLOAD_FIELDS,
)
from deepytorch_core.bench.training_tables import OLDER_DDP

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"
_SECTION = re.compile(
    r"<!-- results:begin(?P<kinds>(?: (?!in )\w+)*)(?: in(?P<names>(?: [\w-]+)+))? -->\n"
    r".*?<!-- results:end -->",
    re.DOTALL,
)
_MARKER = re.compile(r"<!-- results:(begin|end)\b")

# A table of collectives shows these.
NEEDED_FIELDS = (
    *("op", "bytes", "dtype", "world_size", "registered", "baseline", "speedup"),
    *("speedup_spread", "wrong", "machine", "versions", "commit"),
)

# The tables show nothing of the rest, which older records don't have.
NEEDED_OF_TRAIN = tuple(
    field for field in TRAIN_FIELDS if field not in ("round_speedups", "emulated")
)
NEEDED_OF_COMPILE = tuple(field for field in COMPILE_FIELDS if field != "warmup_phases_s")
_OF_OURS_AND_STOCK = {
    *("engine", "stock", "stock_per_s", "ours_per_s", "speedup", "speedup_spread"),
    *("loss_max_diff", "stock_peak_gib", "ours_peak_gib"),
}
NEEDED_OF_WORKLOAD = tuple(field for field in WORKLOAD_FIELDS if field not in _OF_OURS_AND_STOCK)

NEEDED_OF_DDP = tuple(field for field in DDP_FIELDS if field not in OLDER_DDP)

# A table of collectives on one machine's GPUs shows all of these.
GPU_FIELDS = (
    *NEEDED_FIELDS,
    *("device", "cuda_graph", "algorithm", "time_us", "baseline_time_us", "cpu_us"),
    "baseline_cpu_us",
)

NEEDED_OF_NCCL = ("world_size", "rows", "choices", "machine", "versions", "commit")

_NEEDED: Mapping[str, Iterable[str]] = {
    "collectives": NEEDED_FIELDS,
    "gpu": GPU_FIELDS,
    "ddp": NEEDED_OF_DDP,
    "train": NEEDED_OF_TRAIN,
    "compile": NEEDED_OF_COMPILE,
    "workload": NEEDED_OF_WORKLOAD,
    "parts": NEEDED_OF_WORKLOAD,
    "nccl": NEEDED_OF_NCCL,
    "scripts": SCRIPT_FIELDS,
}


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
            "nccl" and "scripts". Two more show workloads: "parts" without the arm that has all of
            ours, and "headline" in short.
        folder: where links find the files.

    Raises ValueError for a kind that does not exist, and for a record of another kind than `bench`
    writes. A record that no table shows would look like a result that was left out.
    """
    _refuse_unknown(files, kinds)
    parts = [
        render_kind({f"{folder}/{name}": group})
        for name, records in files.items()
        for kind, render_kind in _RENDERERS.items()
        if (not kinds and kind != "headline") or kind in kinds
        if (group := _of_kind(records, kind))
    ]
    return "\n\n".join(parts)


def render_together(
    files: Mapping[str, Sequence[Record]], kind: str, folder: str = "docs/results"
) -> str:
    """Markdown for the records of one kind, all in one table; raises as `render` does."""
    _refuse_unknown(files, (kind,))
    groups = {f"{folder}/{name}": _of_kind(records, kind) for name, records in files.items()}
    lacking = [name for name, group in groups.items() if not group]
    if lacking:
        raise ValueError(f"{lacking[0]} has no results of {kind}")
    return _RENDERERS[kind](groups)


def sections(text: str, files: Collection[str]) -> list[tuple[list[str], list[str]]]:
    """For each pair of markers the kinds that it names, and the files; none for all.

    Raises ValueError unless the markers come in pairs and name files that are there.
    """
    found = list(_SECTION.finditer(text))
    if not found or len(_MARKER.findall(text)) != 2 * len(found):
        raise ValueError(f"the text needs {BEGIN} and, after each, one {END}")
    named = []
    for match in found:
        names = [f"{name}.jsonl" for name in (match["names"] or "").split()]
        absent = [name for name in names if name not in files]
        if absent:
            raise ValueError(f"there is no {absent[0]} among the results")
        named.append((match["kinds"].split(), names))
    return named


def replace(text: str, files: Mapping[str, Sequence[Record]], folder: str = "docs/results") -> str:
    """`text` with tables between its markers.

    Raises ValueError unless these come in pairs, and for workloads of too few steps.
    """
    for name, records in files.items():
        pairs.refuse_few(
            name, [record for record in records if kind_of(record) in ("workload", "parts")]
        )
    named = iter(sections(text, files))

    def section(match: re.Match[str]) -> str:
        kinds, names = next(named)
        if names:
            group = {name: files[name] for name in names}
            table = "\n\n".join(render_together(group, kind, folder) for kind in kinds)
        else:
            table = render(files, kinds=kinds, folder=folder)
        body = f"{table}\n" if table else ""
        return f"{match[0].partition(chr(10))[0]}\n{body}{END}"

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
        files = load(options.results)
        fresh, drawn = charts.replace(replace(text, files, folder), files)
        pictures = {path.parent / name: picture for name, picture in drawn.items()}
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 1
    if options.write:
        for place, content in {path: fresh, **pictures}.items():
            place.write_text(content, encoding="utf-8")
    elif fresh != text or any(_read(place) != picture for place, picture in pictures.items()):
        command = f"python -m deepytorch_core.bench.tables --write {path}"
        sys.stderr.write(f"{path}: the results differ from {options.results}; run {command}\n")
        return 1
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def kind_of(record: Record) -> str:
    """Name the table of the record: that of its benchmark, and of its machine for collectives."""
    on_gpus = record.get("device") == "cuda" and not record.get("emulated")
    if record.get("bench") == "workload" and "ours" not in record.get("arms", ("ours",)):
        return "parts"
    return str(record.get("bench") or ("gpu" if on_gpus else "collectives"))


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    shown = "workload" if kind == "headline" else kind
    return [record for record in records if kind_of(record) == shown]


def _refuse_unknown(files: Mapping[str, Sequence[Record]], kinds: Collection[str]) -> None:
    unknown = [kind for kind in kinds if kind not in _RENDERERS]
    if unknown:
        raise ValueError(f"there are no results of {unknown[0]}: expected {', '.join(_RENDERERS)}")
    for name, records in files.items():
        for kind, fields in _NEEDED.items():
            _refuse_incomplete(name, _of_kind(records, kind), fields)


def _refuse_incomplete(name: str, records: Sequence[Record], fields: Iterable[str]) -> None:
    for number, record in enumerate(records, start=1):
        missing = [field for field in fields if field not in record]
        if missing:
            raise ValueError(f"{name}, record {number}: no table shows it: lacks {missing}")


_RENDERERS: Mapping[str, Callable[[cells.Files], str]] = {
    "collectives": collective_tables.collectives,
    "gpu": collective_tables.gpu,
    "ddp": training_tables.ddp,
    "train": training_tables.train,
    "compile": training_tables.compiled,
    "headline": workload_tables.headline,
    "workload": workload_tables.workloads,
    "parts": workload_tables.parts,
    "nccl": collective_tables.nccl,
    "scripts": training_tables.scripts,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
