"""Makes docs/faults.md from the records of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fault_matrix.cases import FAULTS, PATHS, PHASES

_INTRODUCTION = """\
# What happens when something breaks

Made of docs/faults.jsonl, which `make test-faults RECORD=docs/faults.jsonl PAGE=docs/faults.md`
writes, and of docs/faults-gpu.jsonl, the same with `--device cuda` on another machine; not by hand.
Each case runs in fresh processes: the ranks work, the fault happens to one of them, and the
survivors tell what they got and when. Every case also checks that all survivors agree, that the
error names who is gone, that results are right, that nothing is left (descriptors, threads, child
processes, shared memory mapped, names in /dev/shm), and that the survivors can make a new group.

* **error** 0.1 s: every survivor gets an exception that names the rank; the longest time from the
  fault to it. The machine was busy with other work besides.
* **ends** 6.0 s: every survivor's process says who is gone and ends, before anything is computed
  from what an operation left unfinished on a GPU.
* **recovers**: results stay right, nobody gets an error.
* **leaves** 0.1 s: `destroy_process_group` returns in that time although the other rank is gone.
* **WRONG**: not what is promised; see below the tables.
* A dash: the combination makes no sense or was not run on this machine.
"""
_LIMIT = "6 s"  # of tests/faults/frameworks.py
_MOST_SAID = 150
_PHASES = {
    "init": "before the ranks meet",
    "between": "while nothing runs",
    "collective": "in an all_reduce",
    "destroy": "while leaving",
}


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """The page. Of several records of a case the last counts.

    Records of the soak and of fuzzing may be among them. So may those of planted hangs
    (tests/faults/hangs.py), of faults in every framework (tests/faults/frameworks.py) and of what
    the flight record costs (tests/faults/record_cost.py).

    Raises ValueError for a record of a case that the table does not have, or no record at all.
    """
    latest: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    repeated: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for record in records:
        if "fault" not in record:
            continue
        key = (record["fault"], record["path"], record["phase"])
        if key[0] not in FAULTS or key[1] not in PATHS or key[2] not in PHASES:
            raise ValueError(f"no such case: {' | '.join(key)}")
        kept = repeated if "runs" in record else latest
        # A case that another machine could not run says nothing against one that this could.
        if not record["skipped"] or key not in kept:
            kept[key] = record
    if not latest:
        raise ValueError("there are no records to make the page of")
    lines = [_INTRODUCTION]
    for path in PATHS.values():
        if any(key[1] == path.name and not latest[key]["skipped"] for key in latest):
            lines += _table(path.name, latest)
    lines += _repeated(repeated)
    lines += _in_frameworks(records)
    lines += _figures(records)
    lines += _what_faults_are()
    lines += _wrong(latest)
    lines += _left_by_stock()
    lines += _messages(latest)
    lines += _where(latest)
    return "\n".join(lines) + "\n"


def write_page(page: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes `render(records)` to the file `page`."""
    page.write_text(render(records), encoding="utf-8")


def _table(path: str, latest: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> list[str]:
    lines = [
        f"## {path}: {PATHS[path].means}",
        "",
        "| fault | " + " | ".join(_PHASES[phase] for phase in PHASES) + " |",
        "|---" * (len(PHASES) + 1) + "|",
    ]
    for fault in FAULTS:
        cells = [_cell(latest.get((fault, path, phase))) for phase in PHASES]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _repeated(repeated: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> list[str]:
    if not repeated:
        return []
    lines = [
        "## Many times each",
        "",
        "How long the last survivor took to be told, in seconds, by the command with `--repeat`.",
        "",
        "| fault | path | when | runs | as promised | median | most |",
        "|---|---|---|---|---|---|---|",
    ]
    for (fault, path, phase), record in repeated.items():
        cells = [fault, path, _PHASES[phase], str(record["runs"]), str(record["as_promised"])]
        cells += [f"{record[name]:.2f}" for name in ("median_s", "most_s")]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _in_frameworks(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Faults in jobs of every framework; of several records of one the last counts."""
    latest = {
        (record["framework"], record["planted"]): record
        for record in records
        if record.get("bench") == "framework faults"
    }
    if not latest:
        return []
    named = sum(record["named"] for record in latest.values())
    machines = sorted(
        {
            f"{record['machine']['name']}, torch {record['versions']['torch']}"
            for record in latest.values()
        }
    )
    lines = [
        "## In every framework",
        "",
        "By `make test-frameworks`: three ranks train on CPUs by a framework, and at the fourth",
        "step the fault happens to the last of them. It is named where the error of every other",
        "rank names that rank; *over another*: where one waits for another of them alone, and its",
        "error names the end of that one, whose own error names the rank. Where training goes on,",
        "something has to say what is wrong. The time is from the fault until the last rank was",
        f"told. The limit was {_LIMIT}: a rank that lives on and does not come is named after",
        "that, and one that raises when its process has ended, a second later.",
        "",
        f"{named} of {len(latest)} faults are named; {'; '.join(machines)}.",
        "",
        "| framework | fault | named | after | what is said |",
        "|---|---|---|---|---|",
    ]
    for (framework, planted), record in sorted(latest.items()):
        took_s = record["took_s"]
        after = "goes on" if took_s is None else f"{took_s:.1f} s"
        said = _one_line(record["message"])
        if len(said) > _MOST_SAID:
            said = said[: _MOST_SAID - 4] + " ..."
        answer = "over another" if record.get("named_over_another") else "yes"
        answer = answer if record["named"] else "**NO**"
        said = said.replace("|", "\\|")
        lines.append(f"| {framework} | {planted} | {answer} | {after} | `{said}` |")
    return [*lines, ""]


def _figures(records: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for record in (each for each in records if each.get("bench") == "soak"):
        how = f"`{record['command']}`" if record.keys() & {"held", "attack"} else "`make soak`"
        lines.append(f"* {how}: {_of_soak(record)}; {record['machine']['name']}.")
    lines += _of_fuzzing([each for each in records if each.get("bench") == "fuzz"])
    hangs: dict[str, list[bool]] = {}
    for record in (each for each in records if "plant" in each):
        kind = f"{record['how']} operations on {record.get('device', 'cpu')}"
        if "/" in record.get("script", ""):  # a package's: ours has no folder in its name
            kind += ", in scripts that others wrote"
        hangs.setdefault(kind, []).append(record["right"])
    lines += [
        f"* Planted hangs in {kind}: {sum(right)} of {len(right)} verdicts are right."
        for kind, right in hangs.items()
    ]
    for record in (each for each in records if each.get("bench") == "flight record"):
        low, high = (100 * (each - 1) for each in record["ratio_quartiles"])
        lines.append(
            f"* The flight record adds {100 * (record['ratio'] - 1):+.1f}% ({low:+.1f} to "
            f"{high:+.1f}) to an all_reduce of {record['bytes']} bytes, {record['time_us']} us."
        )
    return ["## Other figures", "", *lines, ""] if lines else []


def _of_soak(record: Mapping[str, Any]) -> str:
    if "collectives" in record:
        took_part = sum(record["participations"].values())
        total, kinds = sum(record["collectives"].values()), len(record["collectives"])
        what = (
            f"{total:,} random collectives of {kinds} kinds, each of two or more ranks and counted "
            f"once ({took_part:,} participations, with groups of one rank)"
        )
    else:  # older ones have only what each rank took part in
        total, kinds = sum(record["operations"].values()), len(record["operations"])
        what = (
            f"{total:,} participations of ranks in random operations of {kinds} kinds (each rank's "
            "counts, and so do groups of one rank)"
        )
    if record["cycles"]:
        what += f" and {record['cycles']} cycles of making and destroying groups"
    if record.get("bytes_per_cycle"):
        most = max(record["bytes_per_cycle"])
        what += f", which grew a rank's memory by at most {max(0, most):,.0f} bytes each"
    if attack := record.get("attack"):
        what += (
            f", {record['by_gloo']:,} of them carried out by gloo as well with the same result, "
            f"while another user sent {attack['datagrams']:,} forged or random messages to the "
            f"job's local sockets and opened {attack['connections']:,} connections with garbage or "
            "nothing to its sockets and ports"
        )
    if held := record.get("held"):
        what += f"; {_of_second_half(held)}"
    return f"{what}; {len(record['failures'])} failures"


def _of_second_half(held: Sequence[Mapping[str, Any]]) -> str:
    speeds = held[0]["per_s"]
    host, gpu = (
        max(0, *(each[name] for each in held)) / 2**20
        for name in ("grown_bytes", "gpu_grown_bytes")
    )
    return (
        f"{min(speeds):.0f} to {max(speeds):.0f} a second in each tenth of the time, the last "
        f"{speeds[-1]:.0f}; in its second half a rank grew by at most {host:.1f} MiB, its GPU's "
        f"memory by {gpu:.1f} MiB"
    )


def _of_fuzzing(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The sum of all runs, and of each target."""
    if not records:
        return []
    executions: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for record in records:
        executions[record["target"]] += record["executions"]
        seconds[record["target"]] += round(record["seconds"])
    each = ", ".join(f"{target} {number:,}" for target, number in executions.items())
    crashes = sum(record["crashes"] for record in records)
    machines = "; ".join(sorted({record["machine"]["name"] for record in records}))
    return [
        f"* `make fuzz`: {executions.total():,} executions ({each}), {min(seconds.values()):,} s "
        f"or more for each target, {crashes} crashes; {machines}."
    ]


def _cell(record: Mapping[str, Any] | None) -> str:
    if record is None or record["skipped"]:
        return "-"
    if _wrong_of(record):
        return "**WRONG**"
    if record["outcome"] == "recovers":
        return "recovers"
    return f"{record['outcome']} {max(record['took_s']):.1f} s"


def _what_faults_are() -> list[str]:
    lines = ["## The faults", ""]
    lines += [f"* {fault.name}: {fault.means}." for fault in FAULTS.values()]
    return [*lines, ""]


def _wrong_of(record: Mapping[str, Any]) -> list[str]:
    """Return what is wrong by today's table: stock's leftovers may have been measured later."""
    fault, left = FAULTS[record["fault"]], "left over: "
    return [
        text
        for text in record["wrong"]
        if not (text.startswith(left) and fault.is_stocks(text.removeprefix(left), record["path"]))
    ]


def _wrong(latest: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> list[str]:
    found = [
        f"* {' | '.join(key)}: {'; '.join(wrong)}"
        for key, record in latest.items()
        if (wrong := _wrong_of(record))
    ]
    return ["## Not as promised", "", *found, ""] if found else []


def _left_by_stock() -> list[str]:
    lines = [
        "## What the stock backend leaves as well",
        "",
        "Gloo or NCCL alone, without us, left this over after the same fault, so it counts against",
        "no case above.",
        "",
    ]
    for fault in FAULTS.values():
        for path, left in fault.stock_leaves.items():
            lines.append(f"* {fault.name}, {path or 'all paths'}: {', '.join(left)}")
    return [*lines, ""]


def _messages(latest: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> list[str]:
    lines = ["## What the errors say", "", "One of each, in the middle of an all_reduce.", ""]
    for (fault, path, phase), record in latest.items():
        told = record["outcome"] in ("error", "ends")
        if phase == "collective" and path in ("shm", "tcp", "gpu", "nccl") and told:
            lines.append(f"* {fault}, {path}: `{_one_line(record['message'])}`")
    return [*lines, ""]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("`", "'")


def _where(latest: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> list[str]:
    ran = [record for record in latest.values() if not record["skipped"]]
    names = sorted(
        {f"{each['machine']['name']}, torch {each['versions']['torch']}" for each in ran}
    )
    return [f"{len(ran)} cases, run on: {'; '.join(names)}. Nodes are emulated on one machine."]
