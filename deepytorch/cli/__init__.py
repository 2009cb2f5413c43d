"""The `deepytorch` command: one file per command, and nothing heavy imported until it runs."""

import sys

import typer

from deepytorch.cli import (
    bench,
    bench_ddp,
    bench_nccl,
    bench_scripts,
    bench_train,
    build,
    check,
    configure,
    console,
    doctor,
    explain,
    help,
    report,
    run,
    topology,
    train,
    tune,
    version,
)

app = typer.Typer(
    name="deepytorch",
    help="A drop-in accelerator for PyTorch training.",
    epilog=help.examples(
        "deepytorch doctor                                 # what to mend first",
        "deepytorch run --nproc-per-node 2 train.py        # your script, faster",
        "deepytorch run --compare --nproc-per-node 2 train.py",
    )
    + "\n\nDEEPYTORCH_ENABLED=0 turns deepytorch off; DEEPYTORCH_DEBUG=1 shows tracebacks. Exit "
    "status 2: wrong use.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain text: nothing is cut to fit a box, here or in a pipe.
    rich_markup_mode=None,
)
for command in (doctor, check, build, run, configure, train, tune, topology, explain, report):
    command.add_to(app)
bench_ddp.add_to(bench.app)
bench_nccl.add_to(bench.app)
bench_scripts.add_to(bench.app)
bench_train.add_to(bench.app)
app.add_typer(bench.app, name="bench")
version.add_to(app)
help.dress(app)

# As a shell has it for what Ctrl-C ended.
_INTERRUPTED = 130


def main() -> None:
    """Runs the command line and exits: 0, 1 after an error, 2 for wrong use; an error is a line.

    Wrong use is the same on all ranks of a job, so rank 0 alone says so.
    """
    console.prepare()
    try:
        status = app(prog_name="deepytorch", standalone_mode=False)
    except typer.Abort:
        console.err().print("aborted")
        sys.exit(1)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        if console.was_interrupted():
            sys.exit(_INTERRUPTED)
        wrong_use = help.usage_error(error)
        if wrong_use is None and console.shows_tracebacks():
            raise
        if wrong_use is None and not isinstance(error, ValueError):
            console.error(error)
            sys.exit(1)
        if console.is_first_rank():
            console.wrong_use(wrong_use or str(error))
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)
