"""`deepytorch bench ddp`: steps of a DDP training, of a small model or of a vision model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepytorch.cli import bench, console, help, shared

if TYPE_CHECKING:
    from deepytorch_core.base.provenance import Record

_BATCH_OF_VISION = 32
_LEAST_STEPS = 4  # for quartiles
_TIMEOUT_S = 600  # of a collective while another rank still compiles its model
_MLP = "mlp"
_OF_MLP = ("parameters",)
_OF_VISION = (
    *("precision", "image_size", "rounds", "compress"),
    *("nodes", "ranks_per_node", "link", "flow_cap", "delay"),
)


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch bench ddp",
        "deepytorch bench ddp --parameters 64M --json out.jsonl",
        "deepytorch bench ddp --model resnet50 --precision amp --device cuda",
        "deepytorch bench ddp --model timm/resnet18 --nodes 2 --link 1gbit",
        "deepytorch bench ddp --model resnet18 --nodes 2 --compress bf16",
        "deepytorch bench ddp --model list",
    )
    app.command(epilog=examples)(ddp)


def ddp(
    context: typer.Context,
    *,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    world_size: Annotated[
        int, typer.Option(help="Ranks, each a process of this machine; may exceed the cores.")
    ] = 2,
    model: Annotated[
        str,
        typer.Option(
            help="mlp: square layers that reduce much for what they compute; or a vision model: a "
            "classifier of torchvision or timm, such as resnet50 or timm/resnet50; list prints all."
        ),
    ] = _MLP,
    parameters: Annotated[
        str, typer.Option(help="Of mlp: about how many weights it has: 1M, 4M, 64M ...")
    ] = "4M",
    precision: Annotated[
        str,
        typer.Option(
            help="Of a vision model: fp32; amp: autocast, to float16 with scaled gradients on GPUs "
            "and to bfloat16 on CPUs; or bf16: all of the model."
        ),
    ] = "fp32",
    image_size: Annotated[
        int,
        typer.Option(help="Of a vision model: pixels of a side; 0: what its weights expect."),
    ] = 0,
    batch_size: Annotated[
        int,
        typer.Option(help="Samples of each rank in a step; of a vision model 32 unless given."),
    ] = 8,
    steps: Annotated[int, typer.Option(help="Timed steps of each arm, at least.")] = 40,
    rounds: Annotated[
        int,
        typer.Option(
            help="Of a vision model: how often each arm trains its share of the steps, in fresh "
            "processes."
        ),
    ] = 2,
    compress: Annotated[
        str,
        typer.Option(
            help="Of a vision model: bf16 adds arms that send gradients as bfloat16, half of the "
            "bytes, rounded: all of ours and, on GPUs, stock with torch's hook."
        ),
    ] = "",
    baseline: Annotated[
        str, typer.Option(help="gloo or nccl; of a vision model what suits the device.")
    ] = "gloo",
    nodes: shared.Nodes = 0,
    ranks_per_node: shared.RanksPerNode = "1",
    link: shared.Link = "",
    flow_cap: shared.FlowCap = "",
    delay: shared.Delay = "",
    json: Annotated[
        Path | None, typer.Option("--json", help="Append a record per comparison to this file.")
    ] = None,
) -> None:
    """Train one model with DistributedDataParallel, ours and the baseline in turns.

    All arms start from the same weights and see the same batches. Prints the percentiles of a step,
    the samples per second of a rank, and by how much ours is faster. A vision model has two arms of
    ours: its collectives and buckets only, and all of it, which also compiles, lays out in
    channels_last and fuses where that is faster. Exits with status 1 when the losses differ by more
    than the order of additions, or for a vision model rounding, explains.
    """
    from deepytorch_core.base import provenance
    from deepytorch_core.bench.job import BenchError, DdpJob, parse_size

    shared.check_place("--json", json)
    if model == "list":
        _print_models()
        return
    if model == _MLP:
        _refuse(context, _OF_VISION, "is of vision models: give --model resnet50, or leave it out")
        from deepytorch_core.bench import launch

        job = DdpJob(
            model=model,
            parameters=parse_size(parameters),
            batch_size=batch_size,
            steps=steps,
            world_size=world_size,
            device=device,
            baseline=baseline,
        )
        rows = list(launch.run(job))
        shown = ddp_lines(rows[0])
    else:
        _refuse(context, _OF_MLP, f"is of --model {_MLP}: {model} has its own; leave it out")
        emulated = bench.emulated_nodes(
            context,
            nodes,
            ranks_per_node=ranks_per_node,
            link=link,
            flow_cap=flow_cap,
            delay=delay,
        )
        if emulated is not None and not bench.was_given(context, "world_size"):
            world_size = sum(emulated.ranks_per_node)
        if image_size < 0:
            raise BenchError(f"--image-size must be 0 or more, not {image_size}")
        if rounds < 1:
            raise BenchError(f"--rounds must be at least 1, not {rounds}")
        least = max(_LEAST_STEPS, 2 * rounds)
        if steps < least:
            raise BenchError(f"--steps must be at least {least} in {rounds} rounds, not {steps}")
        from deepytorch.workloads.headline import ddp as vision

        name, pixels = vision.known(model, image_size)
        usual = "nccl" if device == "cuda" else "gloo"
        vision_job = vision.VisionJob(
            model=name,
            precision=precision,
            image_size=pixels,
            batch_size=batch_size if bench.was_given(context, "batch_size") else _BATCH_OF_VISION,
            steps=-(-steps // rounds),
            world_size=world_size,
            device=device,
            compress=compress,
            baseline=baseline if bench.was_given(context, "baseline") else usual,
            nodes=emulated,
            timeout_s=_TIMEOUT_S,
        )
        rows = vision.compare(vision_job, rounds=rounds, say=lambda text: console.err().print(text))
        shown = vision_lines(rows)
    for row in rows:
        if json is not None:
            provenance.write_record(json, row)
    if json is not None:
        console.err().print(f"written: {json}")
    for line in shown:
        console.out().print(line, soft_wrap=True)
    for row in rows:
        bench.refuse_differing_losses(row)


def _print_models() -> None:
    from deepytorch.examples import vision_models

    for name in (_MLP, *vision_models.names()):
        console.out().print(name, highlight=False)


def _refuse(context: typer.Context, options: Sequence[str], reason: str) -> None:
    from deepytorch_core.bench.job import BenchError

    for option in options:
        if bench.was_given(context, option):
            raise BenchError(f"--{option.replace('_', '-')} {reason}")


def ddp_lines(row: "Record") -> list[str]:
    """Both arms in ACSpeed's form, then the improvement and how the losses compare."""
    from deepytorch_core.bench.record import claimed

    low, high = ((value - 1) * 100 for value in row["speedup_spread"])
    improvement = f"{row['improvement_percent']:+.1f}% (quartiles {low:+.1f}% to {high:+.1f}%)"
    return [
        f"{row['model']}, {row['parameters']:,} parameters in {row['dtype']}, {_reduced(row)}, "
        f"{row['steps']} steps of {row['batch_size']} samples in {row['num_blocks']} blocks",
        f"{row['baseline']:<10} " + _percentiles(row, "baseline_"),
        f"{'deepytorch':<10} " + _percentiles(row, ""),
        f"improvement {claimed(row, improvement)}, losses {bench.difference(row)}",
    ]


def vision_lines(rows: Sequence["Record"]) -> list[str]:
    """All arms in ACSpeed's form, each comparison's speed-up, and how the losses compare."""
    from deepytorch.workloads.headline import ddp as vision
    from deepytorch_core.bench.record import PARTS_OF_DDP, claimed, describe_emulated

    first = rows[0]
    found = [
        f"{first['model']} in {first['precision']}, {first['parameters']:,} parameters, "
        f"{first['image_size']} x {first['image_size']} pixels, {_reduced(first)}, "
        f"{first['steps']} steps of {first['batch_size']} samples in {first['num_blocks']} rounds"
    ]
    if first["emulated"]:
        found.append(describe_emulated(first["emulated"]))
    names = {part: arm for arm, part in {**vision.PARTS, **vision.COMPRESSED_PARTS}.items()}
    width = max(len(names[row["part"]]) for row in rows)
    found.append(f"{'plain':<{width}} " + _percentiles(first, "baseline_"))
    found += [f"{names[row['part']]:<{width}} " + _percentiles(row, "") for row in rows]
    for row in rows:
        low, high = row["speedup_spread"]
        speedup = f"{row['speedup']:.2f}x (quartiles {low:.2f} to {high:.2f}), "
        speedup += f"{row['improvement_percent']:+.1f} %"
        found.append(f"{PARTS_OF_DDP[row['part']]}: {claimed(row, speedup)}")
    return [*found, f"{_losses(rows)}, dropout off"]


def _losses(rows: Sequence["Record"]) -> str:
    differences = [row["loss_difference"] for row in rows]
    if None in differences:
        return "a loss is not a number"
    if not any(differences):
        return "losses equal bit for bit"
    return f"losses differ by at most {100 * max(differences):.2g} %"


def _reduced(row: "Record") -> str:
    memory = ", buckets in registered memory" if row["registered"] else ""
    return f"{row['bytes_per_step'] / 1e6:.1f} MB reduced per step ({row['algorithm']}{memory})"


def _percentiles(row: "Record", arm: str) -> str:
    """The line for one arm of the record; its field names begin with `arm`."""
    from deepytorch_core.bench import percentiles

    size, device, emulated = row["world_size"], row["device"], row["emulated"]
    counts = emulated["ranks_per_node"] if emulated else [size]
    each = counts[0] if len(set(counts)) == 1 else "+".join(map(str, counts))
    return percentiles.line(
        size,
        percentiles.layout(len(counts), each, device),
        device=device,
        times_us=row[f"{arm}step_time_us"],
        samples_per_s=row[f"{arm}samples_per_s"],
    )
