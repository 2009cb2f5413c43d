"""`deepytorch build`: compile the torch adapter ahead of its first use."""

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli import console, help


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch build",
        "deepytorch build --torch 2.15.0 --output adapters",
        "deepytorch build --all-torch --torch-wheels ~/wheels   # no network",
    )
    app.command(epilog=examples)(build)


def build(
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the compiled adapter, instead of the per-user cache."),
    ] = None,
    force: Annotated[bool, typer.Option(help="Compile even if a fitting one is there.")] = False,
    torch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERSION",
            help="For this release of torch, such as 2.13.0, rather than the installed one; may be "
            "given several times.",
        ),
    ] = None,
    all_torch: Annotated[
        bool, typer.Option("--all-torch", help="For every release of torch that is supported.")
    ] = False,
    torch_wheels: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Take torch's wheels from here alone: nothing is downloaded."
        ),
    ] = None,
) -> None:
    """Compile the adapter for the installed torch, once per torch and Python version.

    With --torch or --all-torch pip gets a wheel of each of these releases, one at a time (half a
    gigabyte each). Only the headers of a wheel are used; nothing is installed. This is the only
    command that downloads anything.
    """
    from deepytorch_core.base import torch_builds
    from deepytorch_core.base.errors import AdapterError
    from deepytorch_core.c10d import adapter

    versions = list(torch_builds.RELEASES) if all_torch else torch or []
    if torch_wheels is not None and not versions:
        raise typer.BadParameter("--torch-wheels goes with --torch or --all-torch")
    if not versions:
        _ready(adapter.build(output=output, force=force))
        return
    missing = []
    for version in versions:
        try:
            _ready(_build_for(version, output, force, torch_wheels))
        except AdapterError as error:
            console.err().print(f"torch {version}: {error}", markup=False)
            missing.append(version)
    if missing:
        raise AdapterError(
            f"no adapter for torch {', '.join(missing)}. Without a network put torch's wheels for "
            "this Python into a folder and name it: --torch-wheels FOLDER"
        )


def _build_for(version: str, output: Path | None, force: bool, wheels: Path | None) -> Path:
    """The adapter for a release of torch that need not be installed."""
    import tempfile

    from deepytorch_core.base import torch_builds
    from deepytorch_core.c10d import adapter

    with tempfile.TemporaryDirectory(prefix="deepytorch-torch-") as folder:
        with console.err().status(f"getting torch {version} ..."):
            if wheels is not None:
                build = torch_builds.unpack(torch_builds.pick(version, wheels), Path(folder))
            else:
                wheel = torch_builds.fetch(version, Path(folder))
                build = torch_builds.unpack(wheel, Path(folder))
                wheel.unlink()
        return adapter.build(output=output, force=force, torch=build)


def _ready(path: Path) -> None:
    console.out().print(f"adapter ready: {path}", soft_wrap=True)
