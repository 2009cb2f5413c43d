"""`deepytorch topology`: what deepytorch sees of this machine."""

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli import console


def add_to(app: typer.Typer) -> None:
    app.command()(topology)


def topology(
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the topology to this file.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Show the topology in this file instead of the machine's.")
    ] = None,
) -> None:
    """Show cores, caches, memory, network interfaces and GPUs, and how they are linked."""
    from deepytorch_core import topology as model

    found = model.load(load) if load is not None else model.discover()
    console.out().print(model.describe(found), markup=False, soft_wrap=True)
    if json is not None:
        model.dump(found, json)
        console.err().print(f"written: {json}")
