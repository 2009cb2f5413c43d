"""`deepytorch bench`: ours and a baseline, checked and timed in turns in one run."""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepytorch.cli import bench_table, console, help, shared

if TYPE_CHECKING:
    from deepytorch_core.base.provenance import Record
    from deepytorch_core.bench.job import CollectivesJob, Nodes

app = typer.Typer(help="Measure against a baseline, interleaved in the same run.")


@app.callback()
def _group() -> None:
    """Measure against a baseline, interleaved in the same run."""


@app.command(
    epilog=help.examples(
        "deepytorch bench collectives --sizes 4K:16M",
        "deepytorch bench collectives --ops all_reduce,all_gather --plot out.svg",
        "deepytorch bench collectives --nodes 2 --link 1gbit --delay 1ms",
    )
)
def collectives(
    context: typer.Context,
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
            "nccl-tests counts them: all ranks' parts together for all_gather, reduce_scatter and "
            "all_to_all."
        ),
    ] = "1K:64M",
    per_rank: Annotated[
        bool, typer.Option("--per-rank", help="Sizes are bytes of one rank's part instead.")
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="Comma-separated: float32, bfloat16, float16, float64, int32, ...")
    ] = "float32",
    baseline: Annotated[
        str | None,
        typer.Option(
            help="gloo, nccl, nccl-symm (NCCL on registered symmetric memory), torch-symm (torch's "
            "symmetric memory), deepspeed-shm (DeepSpeed's shared-memory all_reduce; needs "
            "deepspeed) or mpi (Intel MPI; needs impi-rt and mpi4py); default: gloo on CPUs, nccl "
            "on GPUs."
        ),
    ] = None,
    registered: Annotated[
        bool,
        typer.Option(
            "--registered", help="Our tensors lie in registered memory, the baseline's do not."
        ),
    ] = False,
    direct: Annotated[
        bool,
        typer.Option(
            "--direct",
            help="Call the groups' backends past torch.distributed's Python functions and "
            "dispatcher, as the op of deepspeed-shm is called.",
        ),
    ] = False,
    cuda_graph: Annotated[
        bool,
        typer.Option(
            "--cuda-graph",
            help="Time replays of calls captured in CUDA graphs, and check their results too; for "
            "--device cuda.",
        ),
    ] = False,
    beside_compute: Annotated[
        bool,
        typer.Option(
            "--beside-compute",
            help="Time each call together with matrix products that take about as long as the "
            "baseline's call, until both are done; for --device cuda.",
        ),
    ] = False,
    nodes: shared.Nodes = 0,
    ranks_per_node: shared.RanksPerNode = "1",
    link: shared.Link = "",
    flow_cap: shared.FlowCap = "",
    delay: shared.Delay = "",
    order: shared.Order = "block",
    baseline_env: Annotated[
        str,
        typer.Option(
            help="NAME=VALUE,...: variables of the baseline's processes alone, such as hand-set "
            "NCCL_... ones; for emulated nodes on GPUs, where each arm has its own processes."
        ),
    ] = "",
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="On GPUs of emulated nodes: both arms in the same processes, without what "
            "processes differ by and without what deepytorch sets for NCCL.",
        ),
    ] = False,
    forecast: Annotated[
        str,
        typer.Option(
            help="Numbers of nodes such as 2,4,8,16,64,512: print what the measured operations "
            "would take there, by a model fitted to this run or, without --nodes, to the link that "
            "a job measured last."
        ),
    ] = "",
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
    torch.distributed, unless --direct. Exits with status 1 when an element was wrong.
    """
    from deepytorch_core.bench import job as jobs

    shared.check_place("--json", json)
    shared.check_place("--plot", plot)
    emulated = emulated_nodes(
        context,
        nodes,
        ranks_per_node=ranks_per_node,
        order=order,
        link=link,
        flow_cap=flow_cap,
        delay=delay,
    )
    if emulated is not None and not was_given(context, "world_size"):
        world_size = sum(emulated.ranks_per_node)
    baseline = baseline or ("nccl" if device == "cuda" else "gloo")
    make_job: Callable[..., jobs.CollectivesJob] = jobs.CollectivesJob
    can_be_apart = nodes > 0 and device == "cuda"
    if together and not can_be_apart:
        raise jobs.BenchError(
            "--together: both arms share their processes anyway, but for --device cuda with "
            "--nodes: leave it out"
        )
    if can_be_apart and not together:
        from deepytorch_core.bench.collectives_apart import ApartJob

        variables = jobs.parse_variables(baseline_env)
        make_job = functools.partial(ApartJob, baseline_environment=variables)
    elif baseline_env:
        raise jobs.BenchError(
            "--baseline-env needs processes of the baseline's own: --device cuda with --nodes, "
            "without --together"
        )
    job = make_job(
        ops=jobs.parse_names(ops),
        sizes=jobs.parse_sizes(sizes),
        dtypes=jobs.parse_names(dtype),
        per_rank=per_rank,
        world_size=world_size,
        nodes=emulated,
        device=device,
        baseline=baseline,
        registered=registered,
        direct=direct,
        cuda_graph=cuda_graph,
        beside_compute=beside_compute,
        iterations=iterations,
    )

    from deepytorch_core.base import provenance
    from deepytorch_core.bench import forecast as forecasts
    from deepytorch_core.bench import launch

    node_counts = forecasts.parse_nodes(forecast) if forecast else ()
    earlier = (
        provenance.read_records(json) if forecast and json is not None and json.exists() else []
    )
    records = []
    for row in bench_table.shown(launch.run(job), job.baseline):
        records.append(row)
        if json is not None:
            provenance.write_record(json, row)
    if plot is not None:
        from deepytorch_core.bench.plot import plot as write_plot

        write_plot(records, plot)
    for path in filter(None, (json, plot)):
        console.err().print(f"written: {path}")
    for line in (*bench_table.handed_on(records), *bench_table.summary(records)):
        console.out().print(line, soft_wrap=True)
    if node_counts:
        _show_forecast(job, records, earlier, node_counts, json)
    complaints = [
        f"{count} WRONG ELEMENTS in the results of {arm}"
        for arm, field in (("deepytorch", "wrong"), (f"the baseline {baseline}", "baseline_wrong"))
        if (count := sum(row[field] for row in records))
    ]
    for complaint in complaints:
        console.err().print(f"[bold red]error:[/] {complaint}")
    if complaints:
        raise typer.Exit(1)


def _show_forecast(
    job: "CollectivesJob",
    records: Sequence["Record"],
    earlier: Sequence["Record"],
    node_counts: Sequence[int],
    json: Path | None,
) -> None:
    from deepytorch_core.base import config, provenance
    from deepytorch_core.bench import forecast
    from deepytorch_core.bench.job import BenchError
    from deepytorch_core.network import link

    if job.nodes is not None:
        found = forecast.of_run(records, earlier)
    else:
        known = link.latest(config.cache_dir() / "network.json")
        if known is None:
            raise BenchError(
                "--forecast without --nodes goes by the link that a job of several nodes measured "
                "last, and none has: give --nodes 2 and the link's rate"
            )
        cases = [(row["op"], row["bytes"]) for row in records]
        found = forecast.of_link(known, cases, job.world_size)
    for line in forecast.lines(found, node_counts):
        console.out().print(line, soft_wrap=True, highlight=False)
    if json is not None:
        emulated = records[0]["emulated"]
        origin = provenance.provenance()
        provenance.write_record(
            json, {**found.to_record(node_counts), "emulated": emulated, **origin}
        )


def was_given(context: typer.Context, option: str) -> bool:
    # By name: typer brings its own copy of click, or uses the one that is installed.
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def emulated_nodes(
    context: typer.Context, number: int, *, ranks_per_node: str, **settings: str
) -> "Nodes | None":
    """The nodes that the options ask for, `settings` those of `Nodes`; None for none.

    Raises BenchError for options of nodes without --nodes.
    """
    from deepytorch_core.bench.job import BenchError, Nodes, parse_ranks_per_node

    if number:
        return Nodes(ranks_per_node=parse_ranks_per_node(ranks_per_node, number), **settings)
    for option in ("ranks_per_node", *settings):
        if was_given(context, option):
            name = option.replace("_", "-")
            raise BenchError(f"--{name} is for emulated nodes: give --nodes too")
    return None


@app.command(
    epilog=help.examples(
        "deepytorch bench compile --only transformers/llama",
        "deepytorch bench compile --suite default --json out.jsonl",
    )
)
def compile(
    *,
    suite: Annotated[str, typer.Option(help="default: architectures of several libraries.")] = (
        "default"
    ),
    only: Annotated[
        str | None, typer.Option(help="Comma-separated workloads of the suite; default: all.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: cuda where there is a GPU.")
    ] = None,
    policy: Annotated[str, typer.Option(help="auto, or a policy of deepytorch.compile.")] = "auto",
    blocks: Annotated[int, typer.Option(help="Timed blocks of steps of each arm.")] = 7,
    timeout_s: Annotated[
        float, typer.Option(min=1, help="Time limit of one workload, all arms, in seconds.")
    ] = 3600.0,
    json: Annotated[
        Path | None, typer.Option("--json", help="Append one record per workload to this file.")
    ] = None,
) -> None:
    """Train real architectures eagerly, with torch.compile and with ours, in turns.

    Each arm is a process of its own; all start from the same weights and see the same batches.
    Workloads whose library is not installed are named and left out. Exits with status 1 when losses
    differ by more than rounding explains, or a workload was ended by its time limit; the others are
    measured all the same.
    """
    import torch

    from deepytorch.workloads import compile_suite
    from deepytorch.workloads.compile_worker import CompileJob
    from deepytorch_core.base import provenance
    from deepytorch_core.bench import launch
    from deepytorch_core.bench.job import BenchError, parse_names

    shared.check_place("--json", json)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows, ended = [], []
    for name in parse_names(only) if only else compile_suite.names(suite):
        job = CompileJob(
            world_size=1,
            device=device,
            ours="compile",  # no collectives of ours
            timeout_s=math.ceil(timeout_s),
            workload=name,
            blocks=blocks,
            policy=policy,
        )
        try:
            (row,) = launch.run(job, limit_s=timeout_s)
        except launch.TimeLimitError as error:
            console.err().print(
                f"[bold red]error:[/] {name}: {error}: raise --timeout-s, or leave it out by --only"
            )
            ended.append(name)
            continue
        except BenchError as error:
            if "pip install" not in str(error):
                raise
            console.err().print(f"left out: {error}", soft_wrap=True)
            continue
        rows.append(row)
        if json is not None:
            provenance.write_record(json, row)
        console.out().print(compile_line(row), soft_wrap=True)
    if json is not None and rows:
        console.err().print(f"written: {json}")
    if rows:
        console.out().print(compile_summary(rows), soft_wrap=True)
    for row in rows:
        refuse_differing_losses(row)
    if ended:
        raise typer.Exit(1)


def compile_line(row: "Record") -> str:
    """Return a line on what became of one workload."""
    from deepytorch_core.bench.record import claimed

    low, high = row["speedup_spread"]
    speedup = claimed(row, f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})")
    return (
        f"{row['workload']:<30} {row['stock_per_s']:>9.2f} eager {row['ours_per_s']:>9.2f} ours "
        f"samples/s: {speedup}, torch.compile {row['plain_speedup']:.2f}x; "
        f"warm-up {row['warmup_s']:.1f} s, theirs {row['plain_warmup_s']:.1f} s; "
        f"{row['kept']}, {row['reason']}"
        f"{_phases(row.get('warmup_phases_s', {}))}"
    )


def _phases(seconds: Mapping[str, float]) -> str:
    """Say what the warm-up's seconds went into; nothing if that is not known."""
    longest = sorted(seconds.items(), key=lambda phase: -phase[1])
    shown = ", ".join(f"{name} {phase_s:.1f} s" for name, phase_s in longest if phase_s >= 0.1)
    return f"; warm-up was {shown}" if shown else ""


def compile_summary(rows: Sequence["Record"]) -> str:
    """Geometric means over the workloads whose losses agree, and the worst of ours."""
    rows = [row for row in rows if not row["wrong"]]
    if not rows:
        return "no workload has the losses of eager training: no speed-up is claimed"
    ours = statistics.geometric_mean(float(row["speedup"]) for row in rows)
    plain = statistics.geometric_mean(float(row["plain_speedup"]) for row in rows)
    worst = min(rows, key=lambda row: float(row["speedup"]))
    return (
        f"{len(rows)} workloads: ours {ours:.2f}x of eager, torch.compile {plain:.2f}x (geometric "
        f"means); worst of ours {worst['speedup']:.2f}x ({worst['workload']})"
    )


def refuse_differing_losses(row: "Record") -> None:
    if row["wrong"]:
        console.err().print(
            "[bold red]error:[/] THE LOSSES DIFFER by more than the order of additions explains"
        )
        raise typer.Exit(1)


def difference(row: "Record") -> str:
    difference = row["loss_difference"]
    return "equal bit for bit" if difference == 0 else f"relative difference {difference}"


@app.command(epilog=help.examples("deepytorch bench groups --count 64 --world-size 2"))
def groups(
    *,
    count: Annotated[int, typer.Option(help="Groups to make beyond a first one.")] = 64,
    world_size: Annotated[int, typer.Option(help="Ranks, each a process of this machine.")] = 4,
    json: Annotated[
        Path | None, typer.Option("--json", help="Append one record to this file.")
    ] = None,
) -> None:
    """Measure what many process groups cost in time and memory, against gloo."""
    from deepytorch_core.base import provenance
    from deepytorch_core.bench import groups as bench

    shared.check_place("--json", json)
    found = bench.run(count, world_size)
    for line in bench.lines(found):
        console.out().print(line, soft_wrap=True, highlight=False)
    if json is not None:
        provenance.write_record(json, found)
        console.err().print(f"written: {json}")
