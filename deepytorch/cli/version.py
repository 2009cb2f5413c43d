"""`deepytorch --version`: what a bug report begins with, without importing torch."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer


def _show(wanted: bool) -> None:
    if not wanted:
        return
    from deepytorch_core.base import distribution

    named = []
    for name, package in (("deepytorch", distribution.NAME), ("torch", "torch")):
        try:
            named.append(f"{name} {version(package)}")
        except PackageNotFoundError:  # from a source tree that is not installed
            named.append(f"{name} not installed")
    typer.echo(", ".join([*named, f"Python {platform.python_version()}"]))
    raise typer.Exit


def add_to(app: typer.Typer) -> None:
    """Add the option to the command itself."""

    @app.callback()
    def deepytorch(
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                callback=_show,
                is_eager=True,
                help="Show the versions of deepytorch, torch and Python, and exit.",
            ),
        ] = False,
    ) -> None: ...
