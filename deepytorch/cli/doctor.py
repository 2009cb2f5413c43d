"""`deepytorch doctor`: what is wrong with this machine or job, and the command that mends it."""

from __future__ import annotations

import json as encoder
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from deepytorch.cli import console, help
from deepytorch.cli import report as saved

if TYPE_CHECKING:
    from deepytorch_core.doctor.finding import Finding
    from deepytorch_core.doctor.machine import Machine
    from deepytorch_core.doctor.registry import Check
    from deepytorch_core.doctor.together import LaunchedJob

_STYLES = {"okay": "green", "warn": "yellow", "fail": "bold red", "not here": "dim"}
_WORDS = {"okay": "OKAY", "warn": "WARN", "fail": "FAIL", "not here": "  --"}


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch doctor",
        "deepytorch doctor --only shm --only nccl",
        "deepytorch doctor --json | jq '.[] | select(.state == \"fail\")'",
        "torchrun --nnodes 2 ... -m deepytorch.cli doctor   # the link, too",
    )
    app.command(epilog=examples)(doctor)


def doctor(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this check; may be given several times.",
            autocompletion=lambda incomplete: help.matching(_names(), incomplete),
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="A run's saved report, to judge what it says of loaders' waits."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine and environment; every WARN and FAIL comes with the command that mends it.

    Exit status 1 when a check fails. Under torchrun (torchrun ... -m deepytorch.cli doctor) it also
    measures the link between the nodes, and rank 0 shows what is wrong on any of them.
    """
    from deepytorch_core.doctor import registry
    from deepytorch_core.doctor.machine import Machine

    checks = registry.chosen(only or [])
    machine = Machine(report=saved.read(report) if report is not None else None)
    job = _job()
    if job is None:
        screen = console.err()
        if screen.is_terminal and any(check.asks_torch for check in checks):
            with screen.status("asking torch and the GPUs ..."):
                machine.begin()
        shown = registry.examine(machine, checks)
        findings = list(shown) if json else [_show(finding) for finding in shown]
    else:
        findings = _with_ranks(job, machine, checks)
        if job.rank != 0:
            return
        if not json:
            for finding in findings:
                _show(finding)
    if json:
        sys.stdout.write(
            encoder.dumps([finding.to_dict() for finding in findings], indent=1) + "\n"
        )
    else:
        _sum_up(findings)
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


def _names() -> list[str]:
    from deepytorch_core.doctor import registry

    return [check.name for check in registry.chosen([])]


def _job() -> LaunchedJob | None:
    """The ranks that a launcher started with this one; None for a process that is alone."""
    from deepytorch_core.base import config

    launched = config.launched()
    if launched is None or launched.size == 1 or config.rendezvous_address() is None:
        return None
    from deepytorch_core.doctor.together import LaunchedJob

    return LaunchedJob(launched.rank, launched.size)


def _with_ranks(job: LaunchedJob, machine: Machine, checks: Sequence[Check]) -> list[Finding]:
    """Return what all ranks found together, on rank 0; nothing on others."""
    from deepytorch_core.doctor import registry

    with_link = any(check.name == "link" for check in checks)
    machine.together = job.measure(machine, with_link=with_link)
    own = list(registry.examine(machine, checks)) if machine.together.is_leader else []
    return job.exchange(own)


def _show(finding: Finding) -> Finding:
    """Show what was found, and the remedy below it."""
    out = console.out()
    style = _STYLES[finding.state]
    evidence = Text(finding.evidence, "dim" if finding.state == "not here" else "")
    if finding.node:
        evidence = Text.assemble((f"{finding.node}: ", "bold"), evidence)
    line = (Text(_WORDS[finding.state], style), Text(finding.check), evidence)
    if not out.is_terminal:
        # A line stays a line, for who searches it.
        out.print(f"{line[0]}  {finding.check:<12} {evidence}", markup=False, soft_wrap=True)
        if finding.remedy:
            out.print(f"{'':<18} {finding.remedy}", markup=False, soft_wrap=True)
        return finding
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=4, no_wrap=True)
    table.add_column(width=12, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(*line)
    if finding.remedy:
        table.add_row("", "", Text(finding.remedy, "cyan"))
    out.print(table)
    return finding


def _sum_up(findings: Sequence[Finding]) -> None:
    counts = {state: sum(finding.state == state for finding in findings) for state in _STYLES}
    text = f"{counts['okay']} okay, {counts['warn']} to improve, {counts['fail']} broken"
    console.out().print(f"\n{text}, {counts['not here']} not here")
