"""`deepytorch run SCRIPT ...`: torchrun with deepytorch activated, no change to the script."""

from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    passes_on = {"ignore_unknown_options": True, "allow_extra_args": True}
    settings = {**passes_on, "allow_interspersed_args": False}
    app.command(context_settings=settings, options_metavar="[TORCHRUN OPTIONS] SCRIPT [ARGS]...")(
        run
    )


def run(
    context: typer.Context,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            "--nproc-per-node",
            "--nproc_per_node",
            help="Processes on this machine: a number, gpu, cpu or auto. Default: one per GPU, "
            "or 1 without a GPU.",
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(help="Machines, or a range MIN:MAX. Default: 1."),
    ] = None,
    module: Annotated[
        bool,
        typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m."),
    ] = False,
) -> None:
    """Run a training script, unmodified, under torchrun with deepytorch activated.

    Every other option of torchrun is passed on to it; the exit status is the script's.
    """
    from deepytorch.cli import launcher

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
    options = launcher.parse(arguments, command="deepytorch run", default_processes=default)
    raise typer.Exit(launcher.launch(launcher.activated(options)))
