"""Options that several commands have."""

import os
from pathlib import Path
from typing import Annotated

import typer


def check_place(option: str, file: Path | None) -> None:
    """Raises ValueError, before anything is measured, if `file` can't be written later."""
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"{option} {file} is a folder: name a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {file} can't be written: {error}") from None
    place = file if file.exists() else file.parent
    if not os.access(place, os.W_OK):
        raise ValueError(f"{option} {file} can't be written: no permission for {place}")


def check_folder(option: str, folder: Path) -> None:
    """Raises ValueError, before anything is run, if files can't be written there later."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {folder} can't be written: {error}") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {folder} can't be written: no permission for it")


ProcessesPerNode = Annotated[
    str | None,
    typer.Option(
        "--nproc-per-node",
        "--nproc_per_node",
        help="Processes on this machine: a number, gpu, cpu or auto. Default: one per GPU, "
        "or one process that is no job where there are not several.",
    ),
]
Module = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")
]

# The number of emulated nodes.
Nodes = Annotated[
    int,
    typer.Option(
        help="Emulate so many nodes on this machine, in network namespaces (needs root and "
        "pyroute2); the ranks are then those of the nodes. 0: no emulation."
    ),
]
RanksPerNode = Annotated[
    str, typer.Option(help="Ranks of each emulated node; 4,2 for nodes that differ.")
]
Link = Annotated[
    str, typer.Option(help="An emulated node's rate in each direction: 1gbit, 250mbit.")
]
FlowCap = Annotated[str, typer.Option(help="What one TCP connection gets of it at most: 250mbit.")]
Delay = Annotated[str, typer.Option(help="Delay from node to node, one way: 1ms.")]
Order = Annotated[
    str,
    typer.Option(help="How ranks are dealt out to the emulated nodes: block, cyclic or random."),
]
