"""`deepytorch explain`: which plan serves a collective of some size here, and why."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from deepytorch.cli import bench, console, help, shared

if TYPE_CHECKING:
    from deepytorch_core.report.explain import Answer, DeviceAnswer, PlanCandidate
    from deepytorch_core.report.explain_nodes import BetweenNodes
    from deepytorch_core.report.explain_stages import Stages


_WHAT = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"),
    *("all_to_all", "compile", "patches"),
)

_WAYS = {
    "direct": "straight to each",
    "ring": "round a ring of the nodes",
    "chain": "along a chain of the nodes",
}
_MOST_LISTED = 8


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch explain all_reduce 4M",
        "deepytorch explain all_gather 64K --world-size 4 --measure",
        "deepytorch explain all_reduce 16M --nodes 2 --ranks-per-node 2 --link 1gbit",
        "deepytorch explain compile",
        "deepytorch explain patches",
    )
    app.command(epilog=examples)(explain)


def explain(
    context: typer.Context,
    operation: Annotated[
        str,
        typer.Argument(
            help="all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter or "
            "all_to_all; or compile; or patches.",
            autocompletion=lambda incomplete: help.matching(_WHAT, incomplete),
        ),
    ],
    size: Annotated[
        str | None,
        typer.Argument(
            help="Bytes, as nccl-tests counts them: 4096, 64K, 4M, 1G. For compile: a model's "
            "class; default: all."
        ),
    ] = None,
    *,
    world_size: Annotated[
        int | None,
        typer.Option(help="Ranks, each a process of this machine; default: one per usable core."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, ...")] = (
        "float32"
    ),
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure now, whatever the profile says.")
    ] = False,
    nodes: shared.Nodes = 0,
    ranks_per_node: shared.RanksPerNode = "1",
    link: shared.Link = "",
    flow_cap: shared.FlowCap = "",
    delay: shared.Delay = "",
    order: shared.Order = "block",
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Show the candidates for a collective with their times, the choice and its reason.

    Runs the collective once on ranks of this machine, with the option tune as it is set. What
    jobs on GPUs measured, the profile has, and is shown below. With --nodes the ranks live on
    emulated nodes, and what the plan does within and between them is shown step by step.
    `explain compile` shows what earlier runs decided about compiling models, with the places of
    graph breaks. `explain patches` lists what is replaced in other libraries, why, and by which
    option it stays as it is.
    """
    if operation == "compile":
        if nodes:
            raise typer.BadParameter("--nodes is for collectives: leave it out")
        from deepytorch.cli import explain_compile

        explain_compile.show(size, json=json)
        return
    if operation == "patches":
        from deepytorch.cli import explain_patches

        explain_patches.show(json=json)
        return
    if size is None:
        raise typer.BadParameter(f"explain {operation} needs a size: 4096, 64K, 4M, 1G")
    from deepytorch_core import _core
    from deepytorch_core.base import config
    from deepytorch_core.bench.job import parse_size
    from deepytorch_core.report import explain as model

    emulated = bench.emulated_nodes(
        context,
        nodes,
        ranks_per_node=ranks_per_node,
        order=order,
        link=link,
        flow_cap=flow_cap,
        delay=delay,
    )
    if world_size is None and emulated is not None:
        world_size = sum(emulated.ranks_per_node)
    question = model.PlanQuestion(
        op=operation,
        bytes=parse_size(size),
        dtype=dtype,
        world_size=max(2, _core.usable_cores()) if world_size is None else world_size,
        tune="force" if measure else config.current().tune,
        nodes=emulated,
    )
    answer = model.ask(question)
    if json:
        import json as encoder

        # Not through rich, which would wrap it.
        typer.echo(encoder.dumps(answer.to_dict(), indent=2))
        return
    show(answer)


def show(answer: "Answer") -> None:
    """Prints the choice and, where there are times, the table of candidates."""
    from deepytorch_core.bench.job import format_size

    out = console.out()
    title = f"{answer.op} of {format_size(answer.bytes)}, {answer.dtype}, {answer.world_size} ranks"
    out.print(console.fields(title, _summary(answer)))
    if answer.candidates:
        out.print(_table(answer.candidates, stock="gloo", column="chunk"))
    if answer.between_nodes is not None:
        out.print(console.fields("the plan, step by step", _steps(answer.between_nodes)))
    if answer.stages is not None:
        out.print(console.fields("on GPUs of such nodes", _stages(answer.stages)))
    for device in answer.devices:
        title = f"on {device.ranks} GPUs: {device.device}"
        out.print(console.fields(title, _device_summary(device)))
        out.print(_table(device.candidates, stock="NCCL", column="grid"))


def _table(candidates: "tuple[PlanCandidate, ...]", *, stock: str, column: str) -> Table:
    table = Table(box=None, title="", title_justify="left")
    for name in ("", "candidate", column, "median us", "quartiles us", f"against {stock}"):
        table.add_column(name, justify="left" if name in ("", "candidate") else "right")
    for candidate in candidates:
        table.add_row(*_cells(candidate, stock), style="bold" if candidate.chosen else None)
    return table


def _device_summary(answer: "DeviceAnswer") -> list[tuple[str, str]]:
    from deepytorch_core.bench.job import format_size

    return [
        ("plan", "NCCL" if answer.algorithm == "delegate" else answer.algorithm),
        ("reason", answer.reason),
        ("measured with", f"{format_size(answer.measured_bytes)} of bfloat16 for each buffer"),
    ]


def _summary(answer: "Answer") -> list[tuple[str, str]]:
    from deepytorch_core.bench.job import format_size

    plan = answer.algorithm
    if answer.chunk_bytes:
        plan += f", chunks of {format_size(answer.chunk_bytes)}"
    rows = [("plan", plan), ("reason", answer.reason), ("known from", answer.source)]
    if answer.measured_bytes is not None and answer.measured_bytes != answer.buffer_bytes:
        note = f"{format_size(answer.measured_bytes)} for each buffer, the middle of its range"
        rows.append(("measured with", note))
    if answer.emulated is not None:
        from deepytorch_core.bench.record import describe_emulated

        rows.append(("network", describe_emulated(answer.emulated)))
    return rows


def _steps(plan: "BetweenNodes") -> list[tuple[str, str]]:
    pieces = f"{plan.pieces} of up to {_size(plan.piece_bytes)}"
    if plan.pieces > 1:
        pieces += f", {plan.under_way} of them under way between nodes at a time"
    rows = [
        ("nodes", _listed([f"ranks {_listed(ranks, ' ')}" for ranks in plan.nodes], "; ")),
        ("rails", _listed([f"ranks {_listed(ranks, '-')}" for ranks in plan.rails], ", ")),
        ("sockets", f"{plan.sockets} between two ranks of a rail"),
        ("from node to node", _WAYS[plan.way]),
        ("pieces", pieces),
        ("over the network", f"a node sends up to {_size(plan.sent_bytes)}"),
    ]
    for number, phase in enumerate(plan.phases, 1):
        what = f"{phase.what}, {_size(phase.bytes)} at a time"
        rows.append((f"{number}. {phase.where}", what))
    return rows


def _stages(stages: "Stages") -> list[tuple[str, str]]:
    if stages.why_not:
        return [("plan", f"NCCL in one piece: {stages.why_not}")]
    sent = f"a node sends {_size(stages.sent_bytes)}"
    if stages.sent_bytes == stages.ring_bytes:
        sent += " either way, in stages with fewer messages"
    else:
        sent += f", in one ring {_size(stages.ring_bytes)}"
    rows = [
        ("plan", "NCCL in stages where the ranks measure that to be faster, else in one piece"),
        ("over the network", sent),
    ]
    for number, phase in enumerate(stages.phases, 1):
        rows.append((f"{number}. {phase.where}", f"{phase.what}, {_size(phase.bytes)}"))
    return rows


def _size(num_bytes: int) -> str:
    from deepytorch_core.bench.job import format_size

    text = format_size(num_bytes)
    return f"{text} bytes" if text.isdecimal() else text


def _listed(items: Sequence[object], separator: str) -> str:
    """All of a few, else the first and the last."""
    texts = [str(item) for item in items]
    if len(texts) > _MOST_LISTED:
        texts = [*texts[: _MOST_LISTED - 2], "...", texts[-1]]
    return separator.join(texts)


def _cells(candidate: "PlanCandidate", stock: str) -> list[str]:
    from deepytorch_core.bench.job import format_size

    low, high = candidate.spread_us
    grid = f"{candidate.channels} x {candidate.threads}" if candidate.channels else ""
    chunk = format_size(candidate.chunk_bytes) if candidate.chunk_bytes else ""
    if candidate.algorithm == "cpu_reduce":
        grid = f"{candidate.channels} slots of {chunk}"
        chunk = f"{candidate.threads} workers"
        if candidate.delegated:
            chunk += f", {candidate.delegated}% by {stock}"
    return [
        "*" if candidate.chosen else "",
        stock if candidate.algorithm == "delegate" else candidate.algorithm,
        ", ".join(filter(None, (grid, chunk))),
        f"{candidate.median_us:.1f}",
        f"{low:.1f}-{high:.1f}",
        "" if candidate.speedup is None else f"{candidate.speedup:.2f}x",
    ]
