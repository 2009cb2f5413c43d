"""`deepytorch explain compile`: what was decided about compiling models here, from the profile."""

import json as encoder
from typing import Any

import typer

from deepytorch.cli import console


def show(model: str | None, *, json: bool) -> None:
    """Print the profile's compile decisions; of one model's class, or all."""
    from deepytorch_core.base import config
    from deepytorch_core.bench.job import BenchError
    from deepytorch_core.guard import profile

    found = [
        entry
        for entry in [*profile.entries(), *profile.notes()]
        if entry["for"]["what"].startswith("compile of ")
        and model in (None, entry["for"]["what"].removeprefix("compile of "))
    ]
    path = config.profile_path()
    if path is None:
        raise BenchError("this user has no home folder: DEEPYTORCH_PROFILE names the profile")
    if not found:
        raise BenchError(
            f"the profile {path} holds no decision about compiling "
            f"{model or 'a model'}: train one with deepytorch.compile(model) first"
        )
    if json:
        typer.echo(encoder.dumps(found, indent=2))
        return
    for entry in found:
        for line in lines(entry):
            console.out().print(line, soft_wrap=True, highlight=False, markup=False)


def lines(entry: dict[str, Any]) -> list[str]:
    """A decision for people: the choice, times, regions, graph breaks with their places."""
    key = entry["for"]
    where = f"{key['world_size']} rank(s), torch {key['torch']}, {key['machine']}"
    shown = [f"{key['what']} ({where}): {entry['chosen']}, {entry['reason']}"]
    shown += [f"  {name}: {ms:.3f} ms a step" for name, ms in entry["times_ms"].items()]
    for name, tried in entry.get("regions", {}).items():
        count = entry.get("blocks", {}).get(name, 1)
        shared = f", shared by {count} blocks" if count > 1 else ""
        shown.append(f"  region {name}: {' and '.join(tried)}{shared}")
    shown += [f"  dropped {name}: {why}" for name, why in entry.get("dropped", {}).items()]
    shown += [f"  graph break: {line}" for line in entry.get("graph_breaks", [])]
    if "compile_s" in entry:
        shown.append(f"  compiling took {entry['compile_s']:.1f} s")
    phases = [f"{name} {phase_s:.1f} s" for name, phase_s in entry.get("trial_s", {}).items()]
    if phases:
        shown.append(f"  until it was decided, training steps included: {', '.join(phases)}")
    return shown
