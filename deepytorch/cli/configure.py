"""`deepytorch config`: four questions, and their answers as a file for `deepytorch train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from deepytorch.cli import help, shared

_FILE = Path("deepytorch.yaml")
_ENGINES = ("ddp", "fsdp2", "deepspeed", "accelerate")


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch config                  # asks, and writes deepytorch.yaml",
        "deepytorch config --default        # what this machine suggests",
        "deepytorch config mine.yaml        # for deepytorch train RECIPE",
    )
    app.command(name="config", epilog=examples)(configure)


def configure(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = Path(
        "deepytorch.yaml"
    ),
    *,
    default: Annotated[
        bool, typer.Option("--default", help="Ask nothing: take what this machine suggests.")
    ] = False,
) -> None:
    """Ask where and how recipes are to train, and write that as YAML for `train --config`."""
    shared.check_place("FILE", file)
    from deepytorch.cli import launcher

    num_gpus = launcher.num_gpus()
    answers: dict[str, Any] = {
        "device": "cuda" if num_gpus else "cpu",
        "processes": num_gpus or 2,
        "engine": "ddp",
        "precision": "auto",
    }
    if not default:
        answers = _asked(answers, num_gpus)
    lines = [f"{key}: {value}" for key, value in answers.items()]
    told = "# For deepytorch train RECIPE --config; KEY=VALUE on the command line wins.\n"
    file.write_text(told + "\n".join(lines) + "\n", encoding="utf-8")
    typer.echo(f"{file} is written: deepytorch train RECIPE --config {file}")


def _asked(suggested: dict[str, Any], num_gpus: int) -> dict[str, Any]:
    there = f"{num_gpus} GPUs here" if num_gpus else "no GPU here"
    device = _choice(f"Train on cpu or cuda ({there})?", ("cpu", "cuda"), suggested["device"])
    usual = suggested["processes"] if device == suggested["device"] else 2
    processes = 0
    while processes < 1:
        processes = typer.prompt("How many processes on this machine?", type=int, default=usual)
    engine = _choice(
        "How do they share the model? ddp: each has all of it; fsdp2, deepspeed: a part each",
        _ENGINES,
        suggested["engine"],
    )
    precision = _choice(
        "Precision? auto: bf16 on GPUs, for a model or data of yours",
        ("auto", "fp32", "bf16", "fp16", "fp8"),
        suggested["precision"],
    )
    return {"device": device, "processes": processes, "engine": engine, "precision": precision}


def _choice(question: str, choices: tuple[str, ...], suggested: str) -> str:
    while True:
        answer: str = typer.prompt(f"{question} ({', '.join(choices)})", default=suggested).strip()
        if answer in choices:
            return answer
        typer.echo(f"{answer!r} is none of {', '.join(choices)}", err=True)
