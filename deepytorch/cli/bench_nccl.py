"""`deepytorch bench nccl`: which algorithm and protocol NCCL is fastest with, as a table for it."""

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli import bench, console, help, shared


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch bench nccl --world-size 4 --write table.json",
        "deepytorch bench nccl --nodes 2 --ranks-per-node 2 --link 24gbit",
    )
    app.command(epilog=examples)(nccl)


def nccl(
    context: typer.Context,
    *,
    world_size: Annotated[
        int, typer.Option(help="Ranks, each with a GPU of this machine; not with --nodes.")
    ] = 2,
    ops: Annotated[
        str,
        typer.Option(help="Comma-separated: all_reduce, all_gather, reduce_scatter, broadcast."),
    ] = "all_reduce,all_gather,reduce_scatter",
    sizes: Annotated[
        str,
        typer.Option(help="FIRST:LAST[:FACTOR], factor 4 unless given, or a list such as 4K,1M."),
    ] = "16K:64M",
    nodes: shared.Nodes = 0,
    ranks_per_node: shared.RanksPerNode = "1",
    link: shared.Link = "",
    flow_cap: shared.FlowCap = "",
    delay: shared.Delay = "",
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the table for NCCL's tuner plugin here; jobs go by the one that "
            "is named nccl_tuner.json in the cache folder."
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Append the record to this file.")
    ] = None,
) -> None:
    """Measure NCCL's algorithms and protocols against its own choice, in turns.

    Prints for each size what NCCL's own choice takes and how much faster each other one is. What
    is faster by 3% and beyond the noise, twice, becomes a table for NCCL's tuner plugin.
    """
    from deepytorch_core.base.provenance import write_record
    from deepytorch_core.bench import launch, nccl_choices
    from deepytorch_core.bench.job import parse_names, parse_sizes
    from deepytorch_core.network import nccl_table

    shared.check_place("--write", write)
    shared.check_place("--json", json)
    emulated = bench.emulated_nodes(
        context, nodes, ranks_per_node=ranks_per_node, link=link, flow_cap=flow_cap, delay=delay
    )
    if emulated is not None and not bench.was_given(context, "world_size"):
        world_size = sum(emulated.ranks_per_node)
    job = nccl_choices.ChoicesJob(
        world_size=world_size,
        device="cuda",
        baseline="nccl",
        ops=parse_names(ops),
        sizes=parse_sizes(sizes),
        nodes=emulated,
    )
    (result,) = launch.run(job)
    for line in nccl_choices.lines(result):
        console.out().print(line, soft_wrap=True, highlight=False)
    if write is not None:
        nccl_table.write(write, [nccl_table.Entry(**choice) for choice in result["choices"]])
        console.err().print(f"written: {write}")
    if json is not None:
        write_record(json, result)
        console.err().print(f"written: {json}")
