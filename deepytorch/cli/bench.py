"""`deepytorch bench collectives`: our collectives and a baseline, checked and timed in one run."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Table

from deepytorch.cli import console

if TYPE_CHECKING:
    from deepytorch_core.bench.record import Record

app = typer.Typer(help="Measure against a baseline, interleaved in the same run.")

_RIGHT = ("size", "count", "time us", "algbw GB/s", "busbw GB/s", "#wrong")


@app.callback()
def _group() -> None:
    """Measure against a baseline, interleaved in the same run."""


@app.command()
def collectives(
    *,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    world_size: Annotated[
        int, typer.Option(help="Ranks, each a process of this machine; may exceed the cores.")
    ] = 2,
    ops: Annotated[
        str,
        typer.Option(
            help="Comma-separated: all_reduce, all_gather, reduce_scatter, broadcast, "
            "all_to_all, barrier."
        ),
    ] = "all_reduce",
    sizes: Annotated[
        str,
        typer.Option(
            help="FIRST:LAST[:FACTOR], factor 4 unless given, or a list such as 4K,1M; bytes as "
            "nccl-tests counts them."
        ),
    ] = "1K:64M",
    dtype: Annotated[
        str, typer.Option(help="Comma-separated: float32, bfloat16, float16, float64, int32, ...")
    ] = "float32",
    baseline: Annotated[str, typer.Option(help="gloo or nccl.")] = "gloo",
    registered: Annotated[
        bool, typer.Option("--registered", help="Our tensors live in the backend's own memory.")
    ] = False,
    iterations: Annotated[
        int, typer.Option(help="Timed calls per block; 0 adapts to the operation.")
    ] = 0,
    json: Annotated[
        Path | None, typer.Option("--json", help="Append one record per row to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a picture to this file (png, svg, pdf).")
    ] = None,
) -> None:
    """Check and time collectives; prints nccl-tests' columns, the baseline's time and the speed-up.

    Each size is first compared with an exact result, then both are timed in turns through
    torch.distributed. Exits with status 1 when an element was wrong.
    """
    from deepytorch_core.bench import job as jobs

    job = jobs.Job(
        ops=jobs.parse_names(ops),
        sizes=jobs.parse_sizes(sizes),
        dtypes=jobs.parse_names(dtype),
        world_size=world_size,
        device=device,
        baseline=baseline,
        registered=registered,
        iterations=iterations,
    )

    from deepytorch_core.bench import launch, record

    records = []
    for row in _shown(launch.run(job), job.baseline):
        records.append(row)
        if json is not None:
            record.write_record(json, row)
    if plot is not None:
        from deepytorch_core.bench.plot import plot as write_plot

        write_plot(records, plot)
    for path in filter(None, (json, plot)):
        console.err().print(f"written: {path}")
    wrong = sum(row["wrong"] for row in records)
    if wrong:
        console.err().print(f"[bold red]error:[/] {wrong} wrong elements")
        raise typer.Exit(1)


def _shown(rows: Iterable["Record"], baseline: str) -> Iterator["Record"]:
    """The same rows, each added to a table on the screen as it comes."""
    from deepytorch_core.bench.job import format_size

    table = Table(box=None)
    for name in ("op", "size", "count", "type", "redop", "root", "algorithm"):
        table.add_column(name, justify="right" if name in _RIGHT else "left")
    for name in _RIGHT[2:]:
        table.add_column(name, justify="right")
    table.add_column(f"{baseline} us", justify="right")
    table.add_column("speed-up", justify="right")
    out = console.out()
    live = Live(table, console=out, refresh_per_second=4)
    with live if out.is_terminal else contextlib.nullcontext():
        for row in rows:
            low, high = row["speedup_spread"]
            table.add_row(
                row["op"],
                format_size(row["bytes"]),
                str(count(row)),
                row["dtype"],
                "sum" if row["op"] in ("all_reduce", "reduce_scatter") else "none",
                "0" if row["op"] == "broadcast" else "-1",
                row["algorithm"],
                f"{row['time_us']:.1f}",
                f"{row['algbw_gbps']:.2f}",
                f"{row['busbw_gbps']:.2f}",
                str(row["wrong"]) if not row["wrong"] else f"[bold red]{row['wrong']}[/]",
                f"{row['baseline_time_us']:.1f}",
                f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})",
            )
            yield row
    if not out.is_terminal:
        out.print(table)


def count(row: "Record") -> int:
    """nccl-tests' column `count`: elements of the buffer, or of one share where ranks share it."""
    import torch

    itemsize: int = getattr(torch, row["dtype"]).itemsize
    shares = row["world_size"] if row["op"] not in ("all_reduce", "broadcast") else 1
    return int(row["bytes"]) // itemsize // shares
