"""`deepytorch build`: compile the torch adapter ahead of its first use."""

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli import console


def add_to(app: typer.Typer) -> None:
    app.command()(build)


def build(
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the compiled adapter, instead of the per-user cache."),
    ] = None,
    force: Annotated[bool, typer.Option(help="Compile even if a fitting one is there.")] = False,
) -> None:
    """Compile the adapter for the installed torch, once per torch and Python version."""
    from deepytorch_core import adapter

    path = adapter.build(output=output, force=force)
    console.out().print(f"adapter ready: {path}", soft_wrap=True)
