"""The `deepytorch` command: one file per command, and nothing heavy imported until it runs."""

import sys

import typer

from deepytorch.cli import (
    bench,
    bench_train,
    build,
    console,
    doctor,
    explain,
    report,
    run,
    topology,
    train,
    tune,
)

app = typer.Typer(
    name="deepytorch",
    help="A drop-in accelerator for PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (doctor, build, run, train, tune, topology, explain, report):
    command.add_to(app)
bench_train.add_to(bench.app)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Runs the command line; an error becomes one message and exit status 1."""
    try:
        app(prog_name="deepytorch")
    except Exception as error:
        if console.shows_tracebacks():
            raise
        console.error(error)
        sys.exit(1)
