"""`deepytorch bench train`: a framework on a small model, or a workload of the headline table."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepytorch.cli import bench, console, help, shared

if TYPE_CHECKING:
    from deepytorch_core.base.provenance import Record
    from deepytorch_core.bench.job import Nodes

_STEPS_OF_WORKLOAD = 16
_TIMEOUT_S = 600  # of a collective while another rank still builds or compiles its model


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch bench train --framework fsdp2 --steps 20",
        "deepytorch bench train --framework fsdp2 --nodes 2 --link 1gbit",
        "deepytorch bench train --workload list",
    )
    app.command(epilog=examples)(train)


def train(
    context: typer.Context,
    *,
    framework: Annotated[
        str,
        typer.Option(
            help="ddp, ddp-small-buckets, fsdp1, fsdp2, deepspeed-zero1, -zero2, -zero3, "
            "-zero3-offload_param, -zero3-offload_optimizer, accelerate-ddp, accelerate-fsdp2, "
            "megatron, tensor-parallel or tensor-parallel-decode."
        ),
    ] = "ddp",
    workload: Annotated[
        str,
        typer.Option(
            help="Instead of a small model: a row of the headline table, such as resnet50-amp, in "
            "the arms plain, tuned and ours; list prints all."
        ),
    ] = "",
    scale: Annotated[
        str, typer.Option(help="Of a workload: full (GPUs), or tiny: the same code on a CPU.")
    ] = "full",
    rounds: Annotated[int, typer.Option(help="How often each arm trains, in fresh processes.")] = 2,
    split: Annotated[
        bool, typer.Option("--split", help="Of a workload: also ours' collectives and compute.")
    ] = False,
    arms: Annotated[
        str, typer.Option(help="Of a workload: only these arms, such as plain,ours.")
    ] = "",
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Of a workload under DDP: plain and ours-collectives in the same processes, in "
            "turns, without what processes differ by.",
        ),
    ] = False,
    layers: Annotated[
        int, typer.Option(help="Of a workload: layers; default: as many as fit, up to all.")
    ] = 0,
    nodes: Annotated[
        int, typer.Option(help="Emulated nodes that the ranks are dealt out to; needs root.")
    ] = 0,
    link: Annotated[str, typer.Option(help="With --nodes: each node's link, as 24gbit.")] = "",
    device: Annotated[
        str, typer.Option(help="cpu or cuda; default of a workload at full scale: cuda.")
    ] = "cpu",
    world_size: Annotated[
        int, typer.Option(help="Ranks on this machine; of a workload at full scale: its own.")
    ] = 2,
    parameters: Annotated[
        str, typer.Option(help="About how many weights the model has: 1M, 4M, 64M ...")
    ] = "4M",
    batch_size: Annotated[
        int,
        typer.Option(help="Samples of each rank in a step: few make it communicate, many work."),
    ] = 8,
    steps: Annotated[
        int,
        typer.Option(help="Timed steps of each arm, in all; of a workload: in each round, 16."),
    ] = 40,
    trace: Annotated[
        Path | None,
        typer.Option(help="Of a framework: write each process's torch.profiler trace into here."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Append the record to this file.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Of a workload: write the table of all that --json has, as .md, .png or .html."
        ),
    ] = None,
) -> None:
    """Train under a framework, with its adapter and stock, in processes that take turns.

    Both arms are fresh processes that start from the same weights and see the same batches. Exits
    with status 1 when the losses differ by more than the order of additions explains.
    """
    from deepytorch_core.base import provenance
    from deepytorch_core.bench import job as jobs

    shared.check_place("--json", json)
    shared.check_place("--report", report)
    if trace is not None:
        shared.check_place("--trace", trace / "round1")
    if together and not workload:
        raise jobs.BenchError("--together is of a workload; bench ddp does so with a small model")
    if report is not None:
        _check_report(report, workload, json)
    if workload == "list":
        _print_workloads()
        return
    if workload:
        if scale == "full" and not bench.was_given(context, "device"):
            device = "cuda"
        if trace is not None:
            raise jobs.BenchError("--trace is of a framework: leave --workload out")
        from deepytorch.workloads import headline
        from deepytorch.workloads.headline.job import ArmJob, TogetherJob
        from deepytorch.workloads.headline.run import compare, compare_together, lines

        kind = TogetherJob if together else ArmJob
        job = kind(
            workload=workload,
            scale=scale,
            device=device,
            baseline="gloo" if device == "cpu" else "nccl",
            world_size=world_size,
            steps=steps if bench.was_given(context, "steps") else _STEPS_OF_WORKLOAD,
            layers=layers,
            timeout_s=_TIMEOUT_S,
        )
        if not bench.was_given(context, "world_size") and scale == "full":
            job = dataclasses.replace(job, world_size=headline.ROWS[workload].world_size)
        job = dataclasses.replace(job, nodes=_nodes(nodes, job.world_size, link))
        if isinstance(job, TogetherJob):
            if arms or split:
                raise jobs.BenchError("--together has its own arms: leave --arms and --split out")
            row = compare_together(job, rounds=rounds, say=_say)
        else:
            only = jobs.parse_names(arms)
            row = compare(job, rounds=rounds, split=split, only=only, say=_say)
        shown = lines(row)
    else:
        from deepytorch.workloads import TrainJob
        from deepytorch.workloads import rounds as turns

        train_job = TrainJob(
            framework=framework,
            parameters=jobs.parse_size(parameters),
            batch_size=batch_size,
            steps=steps,
            world_size=world_size,
            device=device,
            baseline="gloo" if device == "cpu" else "nccl",
            trace="" if trace is None else str(trace.absolute()),
            nodes=_nodes(nodes, world_size, link),
        )
        row = turns.compare(train_job, rounds=rounds, say=_say)
        shown = train_lines(row)
    if json is not None:
        provenance.write_record(json, row)
        console.err().print(f"written: {json}")
    if report is not None and json is not None:
        from deepytorch.workloads.headline import page

        rows = provenance.read_records(json)
        page.write([record for record in rows if record.get("bench") == "workload"], report)
        console.err().print(f"written: {report}")
    for line in shown:
        console.out().print(line, soft_wrap=True)
    bench.refuse_differing_losses(row)


def _say(text: str) -> None:
    console.err().print(text, highlight=False)


def _check_report(report: Path, workload: str, json: Path | None) -> None:
    from deepytorch.workloads.headline import page
    from deepytorch_core.bench.job import BenchError

    if not workload or json is None:
        raise BenchError("--report shows the workloads of a file: give --workload and --json too")
    page.check(report)


def _nodes(number: int, world_size: int, link: str) -> "Nodes | None":
    from deepytorch_core.bench.job import BenchError, Nodes

    if not number:
        if link:
            raise BenchError("--link is of emulated nodes: give --nodes too")
        return None
    if world_size % number:
        raise BenchError(f"--world-size {world_size} does not divide among --nodes {number}")
    return Nodes(ranks_per_node=(world_size // number,) * number, link=link)


def _print_workloads() -> None:
    from deepytorch.workloads import headline

    for row in headline.ROWS.values():
        ranks = f"{row.world_size} GPU" + ("s" if row.world_size > 1 else "")
        console.out().print(f"{row.name:<26}{row.title}, {ranks}", highlight=False)


def train_lines(row: "Record") -> list[str]:
    """Say what ran, how long each arm's step took, and how they compare."""
    from deepytorch_core.bench.record import claimed, describe_emulated

    calls = row["native_calls"] + row["delegated_calls"]
    low, high = row["speedup_spread"]
    speedup = f"{row['speedup']:.2f}x (quartiles {low:.2f} to {high:.2f})"
    emulated = row.get("emulated")
    return [
        *([describe_emulated(emulated)] if emulated else []),
        f"{row['framework']} {row['framework_version']}, {row['world_size']} ranks, "
        f"{row['parameters'] / 1e6:.1f} M parameters, batches of {row['batch_size']}: "
        f"{row['steps']} steps in {row['num_blocks']} blocks of "
        f"{len(row['round_speedups'])} rounds, "
        f"{row['native_calls']} of {calls} collectives native",
        f"{row['baseline']:<10} {row['baseline_step_time_us'] / 1e3:.2f} ms a step",
        f"{'deepytorch':<10} {row['step_time_us'] / 1e3:.2f} ms a step, the adapter's Python "
        f"{row['adapter_us']} us of it",
        f"speed-up {claimed(row, speedup)}, losses {bench.difference(row)}",
    ]
