"""`deepytorch topology`: what deepytorch sees of this machine, as a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepytorch.cli import console, help, shared

if TYPE_CHECKING:
    from deepytorch_core.topology.model import Topology


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch topology",
        "deepytorch topology --measure --svg machine.svg",
        "deepytorch topology --json > machine.json",
        "deepytorch topology --from machine.json",
    )
    app.command(epilog=examples)(topology)


def topology(
    *,
    recorded: Annotated[
        Path | None,
        typer.Option("--from", help="Draw the machine in this file, as --json prints it."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure copies between GPUs (some seconds).")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="Also draw it into this SVG file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw it into this PNG file.")] = None,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Everything that is known, as plain text."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON, for --from.")] = False,
) -> None:
    """Show cores, memory, NUMA nodes, networks, RDMA adapters and GPUs, and how they are linked."""
    from deepytorch_core.network import rdma
    from deepytorch_core.topology import model as model

    shared.check_place("--svg", svg)
    shared.check_place("--png", png)

    if recorded is not None and measure:
        raise typer.BadParameter("--measure is for this machine, not for a recorded one")
    found = model.load(recorded) if recorded is not None else model.discover()
    if measure:
        found = _measured(found)
    out = console.out()
    if json:
        sys.stdout.write(found.to_json())
    elif plain:
        out.print(model.describe(found), markup=False, soft_wrap=True)
    else:
        from deepytorch.cli.topology import picture

        # Boxes as wide as a pipe is help nobody who searches it.
        out.print(picture.picture(found, out.width, boxes=out.is_terminal))
    for path in (svg, png):
        if path is not None:
            from deepytorch.cli.topology import figure

            figure.save(found, path, "svg" if path is svg else "png")
            console.err().print(f"written: {path}", markup=False)
    if json:
        return
    for remark in rdma.remarks(found):
        console.err().print(f"remark: {remark}", markup=False)
    choice = rdma.choose(found, set())
    if choice.settings:
        out.print(f"for NCCL   {choice}", markup=False, soft_wrap=True)


def _measured(found: Topology) -> Topology:
    """With what copies between GPUs were measured to carry.

    Raises RuntimeError when they can't be measured, saying why.
    """
    from deepytorch_core.doctor import torch_facts
    from deepytorch_core.topology import machine_map

    if len(found.gpus) < 2:
        raise RuntimeError(f"nothing to measure between GPUs: there are {len(found.gpus)}")
    facts = torch_facts.ask(60.0)
    if not facts.pairs:
        why = facts.error or facts.cuda_error or "torch sees fewer than two GPUs"
        raise RuntimeError(f"copies were not measured: {why}; see deepytorch doctor")
    names = {device.index: device.uuid for device in facts.devices}
    rates = {(names[pair.source], names[pair.target]): pair.direct_gbps for pair in facts.pairs}
    return machine_map.with_measured(found, rates)
