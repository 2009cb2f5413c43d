"""`deepytorch tune SCRIPT ...`: settings of all layers, searched on the script's own step time."""

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
        options_metavar="[OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]...",
        epilog=help.examples(
            "deepytorch tune --nproc-per-node 2 train.py",
            "deepytorch tune --budget-steps 300 --profile tuned.json train.py",
            "deepytorch tune --nodes 2 --link 1gbit --delay 1ms train.py",
        ),
    )(tune)


def tune(
    context: typer.Context,
    nproc_per_node: shared.ProcessesPerNode = None,
    module: shared.Module = False,
    *,
    budget_steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Measured optimizer steps of the whole search; the runs that confirm its winner "
            "come on top.",
        ),
    ] = 100,
    steps: Annotated[
        int, typer.Option(min=4, help="Measured steps of one trial, after 3 that warm up.")
    ] = 6,
    profile: Annotated[
        Path | None,
        typer.Option(help="Where the result is kept. Default: what the option profile says."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1, help="Time limit of one trial in seconds.")
    ] = 1800.0,
    nodes: shared.Nodes = 0,
    ranks_per_node: shared.RanksPerNode = "1",
    link: shared.Link = "",
    flow_cap: shared.FlowCap = "",
    delay: shared.Delay = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write everything that was measured.")
    ] = None,
) -> None:
    """Search bucket sizes, chunk sizes, sockets and buffers together for SCRIPT, and keep the best.

    Each trial is a short job of its own and leaves no checkpoint. What is faster is repeated
    against the defaults, and against the best of one layer alone, in fresh jobs, and kept in the
    profile only if it is faster again: the next run of SCRIPT on as many ranks starts from it.
    """
    arguments = list(context.args)
    if not arguments:
        context.fail("which script? deepytorch tune [OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]...")
    if nproc_per_node is not None:
        arguments.insert(0, f"--nproc-per-node={nproc_per_node}")
    if module:
        arguments.insert(0, "--module")
    default = str(launcher.num_gpus() or 1)
    options = launcher.parse(arguments, command="deepytorch tune", default_processes=default)
    launcher.check_script(context, options)

    from deepytorch.cli import compare
    from deepytorch.cli.tune import emulated, session
    from deepytorch.cli.tune.candidates import WARMUP_STEPS

    if options.no_python:
        raise ValueError("--no-python leaves no Python to look into; give a script")
    shared.check_place("--json", json_file)
    wanted = emulated.Wanted(nodes, ranks_per_node, link, flow_cap, delay)
    if nodes and nproc_per_node is not None:
        raise ValueError("--nodes comes with --ranks-per-node: leave --nproc-per-node out")
    job = compare.Job(
        arguments=tuple(arguments),
        options=options,
        default_processes=default,
        world_size=wanted.world_size or session.processes(options),
        steps=WARMUP_STEPS + steps,
        rounds=1,
        arms=(),
        timeout_s=timeout_s,
        ranks_per_node=wanted.counts,
    )
    with emulated.placed(job, wanted) as placed:
        session.run(
            placed,
            budget_steps=budget_steps,
            profile=None if profile is None else profile.absolute(),
            json_file=None if json_file is None else json_file.absolute(),
        )
