"""Implement `deepytorch bench scripts`: public scripts as they are, stock and with ours."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deepytorch.cli import console, help, shared

if TYPE_CHECKING:
    from deepytorch.cli.bench_scripts.runs import Limits, ScriptRow
    from deepytorch.workloads.scripts.script import Script, Size
    from deepytorch_core.base.provenance import Record
    from deepytorch_core.compare.script_rates import Rates
    from deepytorch_core.compare.script_records import Origin


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch bench scripts --checkouts ~/checkouts --only nanogpt,run-mlm-bert",
        "deepytorch bench scripts --checkouts ~/checkouts --json scripts.jsonl",
    )
    app.command(epilog=examples)(scripts)


def scripts(
    *,
    checkouts: Annotated[
        Path,
        typer.Option(
            help="Folder with the scripts' repositories, each in a folder of its own name; what is "
            "missing there is named with the commands that bring it."
        ),
    ] = Path("checkouts"),
    only: Annotated[str | None, typer.Option(help="Comma-separated scripts; default: all.")] = None,
    size: Annotated[
        Literal["full", "small"] | None,
        typer.Option(
            help="full for a GPU, or small for models and data that a CPU trains in seconds; "
            "default: full where there is a GPU."
        ),
    ] = None,
    seconds: Annotated[
        str,
        typer.Option(
            help="STOCK,FIRST,SECOND[,PEER]: how long runs train, from their first step: stock's, "
            "ours from empty caches, ours with what that one has kept, and another public way's; "
            "or one number for all."
        ),
    ] = "60,150,60",
    rounds: Annotated[
        int, typer.Option(min=0, help="Further pairs of runs, stock and ours with what is kept.")
    ] = 0,
    nproc_per_node: Annotated[
        int, typer.Option(min=1, help="Ranks of each run; scripts for one rank are left out.")
    ] = 1,
    timeout_s: Annotated[
        float, typer.Option(min=1, help="Time limit of one run in seconds, its start included.")
    ] = 1200.0,
    json: Annotated[
        Path | None, typer.Option("--json", help="Append one record per script to this file.")
    ] = None,
) -> None:
    """Run public training scripts, unmodified, stock and with deepytorch, in turns.

    Each run is a process of its own, on made-up data and random weights, without a network. Every
    optimizer step is timed, and the last few are profiled. Exits with status 1 when losses differ
    by more than rounding explains, or a run failed; the others are measured all the same.
    """
    import torch

    from deepytorch.cli.bench_scripts.runs import Limits, parse_seconds
    from deepytorch.workloads.scripts import chosen
    from deepytorch_core.bench.job import BenchError, parse_names

    shared.check_place("--json", json)
    rows = chosen(parse_names(only) if only else ())
    limits = Limits(seconds=parse_seconds(seconds), rounds=rounds, timeout_s=timeout_s)
    size = size or ("full" if torch.cuda.is_available() else "small")
    if size == "full" and not torch.cuda.is_available():
        raise BenchError("--size full is for a GPU, and torch sees none: take --size small")
    json = None if json is None else json.absolute()
    records, failed = run(rows, checkouts.absolute(), size, limits, json=json, ranks=nproc_per_node)
    if json is not None and records:
        console.err().print(f"written: {json}")
    if any(record["wrong"] for record in records):
        console.err().print(
            "[bold red]error:[/] THE LOSSES DIFFER by more than rounding and chance explain"
        )
        raise typer.Exit(1)
    if failed:
        raise typer.Exit(1)


def run(
    rows: Sequence["Script"],
    checkouts: Path,
    size: "Size",
    limits: "Limits",
    *,
    json: Path | None,
    ranks: int = 1,
) -> tuple[list["Record"], list[str]]:
    """Measure the scripts that can run; return their records, and the names of failed ones.

    Raises BenchError where none can run.
    """
    from deepytorch.cli.bench_scripts import runs
    from deepytorch_core.base import provenance
    from deepytorch_core.base.errors import CompareError
    from deepytorch_core.bench.job import BenchError
    from deepytorch_core.compare import script_records

    absent = {script.name: why for script, why in runs.left_out(rows, checkouts, ranks)}
    tell_left_out(absent)
    able = [script for script in rows if script.name not in absent]
    if not able:
        raise BenchError(f"no script can run: --checkouts {checkouts} has what is named above")
    records: list[Record] = []
    failed: list[str] = []
    for script in able:
        checkout = checkouts / script.checkout
        with tempfile.TemporaryDirectory(
            prefix="deepytorch-scripts-", ignore_cleanup_errors=True
        ) as name:
            scratch = Path(name).resolve()
            try:
                row = runs.measure(
                    script, size, checkout, scratch, limits=limits, show=show, ranks=ranks
                )
            except CompareError as error:
                console.err().print(f"{script.name}: {error}", markup=False, soft_wrap=True)
                failed.append(script.name)
                continue
        if row.commit != script.commit:
            out = row.commit or "no commit"
            show(f"{script.name}: read at {script.commit}, checked out is {out}")
        found = script_records.record_of(
            origin_of(row, ranks), row.samples, row.remarks, rates=rates_of(row)
        )
        records.append(found)
        if json is not None:
            provenance.write_record(json, found)
        console.out().print(
            script_records.line(found), soft_wrap=True, markup=False, highlight=False
        )
    if records:
        console.out().print(script_records.summary(records), soft_wrap=True, markup=False)
    return records, failed


def tell_left_out(absent: Mapping[str, str]) -> None:
    for name, why in absent.items():
        console.err().print(f"left out: {name}: {why}", markup=False, soft_wrap=True)


def show(text: str) -> None:
    console.err().print(text, markup=False, highlight=False, soft_wrap=True)


def rates_of(row: "ScriptRow") -> "Rates":
    from deepytorch_core.compare.script_rates import Rates

    script = row.script
    work = None if script.work is None else (script.work.of_token, script.work.of_pair)
    peer = None
    if row.peer is not None and script.peer is not None:
        peer = (script.peer.name, script.peer.arguments, row.peer)
    return Rates(work=work, matrix_rate=row.matrix_rate, peer=peer)


def origin_of(row: "ScriptRow", ranks: int = 1) -> "Origin":
    from deepytorch_core.compare.script_records import Origin

    script = row.script
    return Origin(
        script=script.name,
        repository=script.repository,
        script_commit=row.commit or f"{script.commit}-unverified",
        arguments=script.arguments if row.size == "full" else script.small,
        size=row.size,
        goal=script.goal,
        ranks=ranks,
    )
