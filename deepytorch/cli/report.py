"""`deepytorch report`: what deepytorch would do on this machine, what a run said it did, or why a
job hangs."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deepytorch.cli import console, help, shared


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch report",
        "deepytorch report run.json --html run.html",
        "deepytorch report --hang",
    )
    app.command(epilog=examples)(report)


def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A run's report: json.dump(deepytorch.report().to_dict(), file); several for "
            "several ranks."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write these reports as one HTML page instead.")
    ] = None,
    *,
    hang: Annotated[
        bool, typer.Option("--hang", help="Say who keeps a job on this node waiting.")
    ] = False,
    pid: Annotated[
        list[int] | None,
        typer.Option(help="With --hang: only the jobs of these processes; may be repeated."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="With --hang: only the job of this name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    flight_recorder: Annotated[
        Path | None,
        typer.Option(help="With --hang: also write dumps for torch's fr_trace into this folder."),
    ] = None,
) -> None:
    """Show the environment, the adapter and the options in force, a run's saved reports, or why a
    job hangs."""
    if hang:
        from deepytorch.cli import hang as hanging

        hanging.show(pid or [], job, as_json=as_json, flight_recorder=flight_recorder)
        return
    if pid or job or flight_recorder:
        raise typer.BadParameter("--pid, --job and --flight-recorder go with --hang")
    if as_json and html is not None:
        raise typer.BadParameter("--json prints and --html writes: give one of them")
    if html is not None:
        write_page(html, files or [])
        return
    if as_json:
        saved = {str(file): with_forecast(file) for file in files or []}
        typer.echo(json.dumps(saved or to_dict(), indent=1))
        return
    if files:
        for file in files:
            show_saved(file)
        return
    from deepytorch_core.base import config

    out = console.out()
    out.print(console.fields("environment", environment()))
    out.print(console.fields("\noptions in force", options()))
    for line in config.unknown_variables():
        console.err().print(f"[yellow]warning:[/] {line}")


def to_dict() -> dict[str, Any]:
    """Return what the command shows without files: name -> text, and each option's value."""
    from deepytorch_core.base import config

    return {
        "environment": dict(environment()),
        "options": dataclasses.asdict(config.current()),
        "unknown_variables": config.unknown_variables(),
    }


def environment() -> list[tuple[str, str]]:
    """Machine, versions, and whether the native parts are ready."""
    from deepytorch_core.base import provenance
    from deepytorch_core.c10d import adapter

    machine = provenance.machine_info()
    rows = [("machine", f"{machine['name']}, {machine['memory_gib']} GiB, {machine['kernel']}")]
    rows += [(name, version) for name, version in provenance.versions().items()]
    rows.append(("commit", provenance.commit()))
    try:
        from deepytorch_core import _core

        rows.append(("native core", f"{_core.__version__}, reductions: {_core.reduce_isa()}"))
    except ImportError as error:
        rows.append(("native core", f"not usable: {error}"))
    rows.append(("torch adapter", adapter.state()))
    return rows


def options() -> list[tuple[str, str]]:
    """Every option with its value, marked where it is not the default."""
    from deepytorch_core.base import config

    current, default = config.current(), config.Options()
    rows = []
    for field in dataclasses.fields(current):
        value = getattr(current, field.name)
        changed = value != getattr(default, field.name)
        rows.append((field.name, f"{value}{'  (set)' if changed else ''}"))
    return rows


def write_page(html: Path, files: list[Path]) -> None:
    """Writes reports as one page; raises ValueError for a file that holds none, or no files."""
    from deepytorch_core.report import page as report_page

    if not files:
        raise ValueError("--html needs a run's saved reports: deepytorch report FILE --html PAGE")
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    shared.check_place("--html", html)
    reports, comparisons = {}, []
    for name, file in zip(names, files, strict=True):
        saved = read(file, with_comparisons=True)
        if "native_calls" in saved:
            reports[name] = saved
        else:
            comparisons.append(saved)
    try:
        report_page.write(html, reports, comparisons)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        listed = ", ".join(map(str, files))
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{listed}: no page can be made of what this holds: {reason}") from error
    console.err().print(f"written: {html}", markup=False)


def read(path: Path, *, with_comparisons: bool = False) -> dict[str, Any]:
    """A report saved as JSON, or what `run --compare --json` wrote; ValueError when it is none."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{path} holds no report: {error}") from error
    if with_comparisons and isinstance(saved, dict) and {"verdicts", "runs"} <= saved.keys():
        return saved
    if not isinstance(saved, dict) or "native_calls" not in saved:
        raise ValueError(f"{path} holds no report: it lacks native_calls")
    return saved


def with_forecast(path: Path) -> dict[str, Any]:
    """A report saved as JSON, with `will_it_scale`; raises ValueError when the file holds none."""
    from deepytorch_core.report import scaling as report_scaling

    saved = read(path)
    try:
        return {**saved, "will_it_scale": report_scaling.forecast(saved)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} holds no report: {reason}") from error


def show_saved(path: Path) -> None:
    """Prints a report saved as JSON; raises ValueError when the file holds none."""
    from deepytorch_core.base import config
    from deepytorch_core.report import scaling as report_scaling
    from deepytorch_core.report.summary import Report
    from deepytorch_core.topology.model import size_text

    plain = with_forecast(path)
    try:
        saved = Report.from_dict(plain)
    except ValueError as error:
        raise ValueError(f"{path} holds no report: {error}") from None
    out = console.out()
    out.print(f"{path}: rank {saved.rank}{f' on {saved.host}' if saved.host else ''}", markup=False)
    out.print(str(saved), markup=False, highlight=False, soft_wrap=True)
    for line in report_scaling.lines(plain["will_it_scale"]):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    default = config.Options().to_dict()
    changed = [
        (name, str(value))
        for name, value in saved.options.items()
        if name not in default or value != default[name]
    ]
    used = saved.memory
    memory = [
        (words, size_text(used[name]))
        for name, words in (("host_peak_bytes", "host"), ("registered_bytes", "registered"))
        if name in used
    ]
    memory += [
        (gpu["device"], f"{size_text(gpu['peak_bytes'])} of {size_text(gpu['total_bytes'])}")
        for gpu in used.get("devices", ())
    ]
    loaders = [
        (
            f"{loader['num_workers']} workers",
            f"{loader['waited_s']:.2f} s of {loader['elapsed_s']:.2f} s",
        )
        for loader in saved.loaders
    ]
    for title, rows in (
        ("memory, at most at once", memory),
        ("waiting for DataLoaders", loaders),
        ("options set", changed),
    ):
        if rows:
            out.print(console.fields(f"\n{title}", rows))
