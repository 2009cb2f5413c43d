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
    """Show cores, caches, memory, networks, RDMA adapters and GPUs, and how they are linked."""
    from deepytorch_core import topology as model
    from deepytorch_core.network import rdma

    found = model.load(load) if load is not None else model.discover()
    console.out().print(model.describe(found), markup=False, soft_wrap=True)
    for remark in rdma.remarks(found):
        console.err().print(f"remark: {remark}")
    choice = rdma.choose(found, set())
    if choice.settings:
        console.out().print(f"for NCCL   {choice}", markup=False, soft_wrap=True)
    if json is not None:
        model.dump(found, json)
        console.err().print(f"written: {json}")
