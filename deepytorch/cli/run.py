"""`deepytorch run SCRIPT ...`: Python or torchrun with deepytorch activated, no other change."""

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli import help, launcher, shared


def add_to(app: typer.Typer) -> None:
    passes_on = {"ignore_unknown_options": True, "allow_extra_args": True}
    settings = {**passes_on, "allow_interspersed_args": False}
    app.command(
        cls=launcher.LauncherCommand,
        context_settings=settings,
        options_metavar="[TORCHRUN OPTIONS] SCRIPT [ARGS]...",
        epilog=help.examples(
            "deepytorch run train.py --lr 0.1",
            "deepytorch run --nproc-per-node 2 train.py --lr 0.1",
            "deepytorch run --nnodes 2 --rdzv-endpoint host:29500 train.py",
            "deepytorch run --report run-1 train.py",
            "deepytorch run --compare --steps 100 --nproc-per-node 2 train.py",
        ),
    )(run)


def run(
    context: typer.Context,
    nproc_per_node: shared.ProcessesPerNode = None,
    nnodes: Annotated[
        str | None,
        typer.Option(help="Machines, or a range MIN:MAX. Default: 1."),
    ] = None,
    module: shared.Module = False,
    *,
    report: Annotated[
        Path | None,
        typer.Option(help="Folder in which the run leaves its report when it ends."),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Run a part of SCRIPT stock and accelerated in turns, and compare."
        ),
    ] = False,
    steps: Annotated[int, typer.Option(help="--compare: optimizer steps of each run.")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="--compare: runs of each arm.")] = 2,
    split: Annotated[
        bool, typer.Option("--split", help="--compare: also collectives only and compute only.")
    ] = False,
    total_steps: Annotated[
        int,
        typer.Option(min=0, help="--compare: steps of the whole training, to say what it saves."),
    ] = 0,
    timeout_s: Annotated[
        float, typer.Option(min=1, help="--compare: time limit of one run in seconds.")
    ] = 1800.0,
    html: Annotated[Path, typer.Option(help="--compare: where the receipt is written.")] = Path(
        "deepytorch-compare.html"
    ),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="--compare: also write all samples as JSON.")
    ] = None,
) -> None:
    """Run a training script, unmodified, with deepytorch activated.

    One process on one GPU, or without a GPU, is started as Python would. Several are, under
    torchrun, and one where --nproc-per-node says so. Every other option of torchrun is passed on to
    it; the exit status is the script's. With --compare the script is stopped after --steps
    optimizer steps and leaves no checkpoint.
    """
    from deepytorch_core.base import config

    arguments = list(context.args)
    if not arguments:
        context.fail("which script? deepytorch run [TORCHRUN OPTIONS] SCRIPT [ARGS]...")
    if nproc_per_node is not None:
        arguments.insert(0, f"--nproc-per-node={nproc_per_node}")
    if nnodes is not None:
        arguments.insert(0, f"--nnodes={nnodes}")
    if module:
        arguments.insert(0, "--module")
    default = str(launcher.num_gpus() or 1)
    options = launcher.parse(
        arguments,
        command="deepytorch run",
        default_processes=default,
        own=[name for parameter in context.command.params for name in parameter.opts],
    )
    launcher.check_script(context, options)
    if report is not None:
        if compare:
            raise typer.BadParameter("--compare writes a receipt: say --html where, not --report")
        shared.check_folder("--report", report)
        config.set_for_children("report", str(report.absolute()))
    if not compare:
        raise typer.Exit(launcher.launch(launcher.activated(options)))

    from deepytorch.cli import compare as comparison
    from deepytorch.cli import console
    from deepytorch.cli.compare import report as receipt
    from deepytorch_core.compare.result import STOCK

    def say(line: str) -> None:
        console.err().print(line, markup=False)

    if options.no_python:
        raise ValueError("--no-python leaves no Python to look into; give a script")
    arms = (comparison.COLLECTIVES, comparison.COMPUTE) if split else ()
    job = comparison.Job(
        arguments=tuple(arguments),
        options=options,
        default_processes=default,
        world_size=comparison.processes(options),
        steps=steps,
        rounds=rounds,
        arms=(STOCK, comparison.OURS, *arms),
        timeout_s=timeout_s,
    )
    html, json_file = html.absolute(), None if json_file is None else json_file.absolute()
    shared.check_place("--html", html)
    shared.check_place("--json", json_file)
    samples, remarks = comparison.compare(job, say)
    receipt.show(job, samples, remarks, total_steps=total_steps, html=html, json_file=json_file)
