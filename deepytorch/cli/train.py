"""`deepytorch train RECIPE ...`: a recipe of deepytorch.recipes under torchrun."""

import difflib
import pkgutil
from importlib import util
from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli import help

_PACKAGE = "deepytorch.recipes"
# Told to end, a recipe finishes its step and saves, which takes large models minutes. torchrun
# kills it after 30 s unless told another time.
_TO_SAVE_S = 600


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch train llama_sft --compare",
        "deepytorch train llama_sft --nproc-per-node 2 steps=20",
        "deepytorch train llama_sft --dry-run model=path/to/model",
    )
    app.command(epilog=examples)(train)


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="Name of the recipe, such as llama_sft.",
            autocompletion=lambda incomplete: help.matching(recipes(), incomplete),
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that override the configuration."),
    ] = None,
    *,
    config: Annotated[
        Path | None, typer.Option(help="Configuration to use instead of the recipe's own.")
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Processes. Default: one per GPU, or 2 without a GPU."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train stock and accelerated, and compare.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print how much memory training needs, and stop.")
    ] = False,
) -> None:
    """Train a recipe, or compare it with the stock way of training it."""
    find(recipe)
    arguments = [check_setting(text) for text in settings or []]
    if compare:
        arguments.insert(0, "--compare")
    if dry_run:
        arguments.insert(0, "--dry-run")
    if config is not None:
        if not config.is_file():
            raise ValueError(f"no configuration at {config}")
        arguments[:0] = ["--config", str(config)]

    from deepytorch.cli import launcher
    from deepytorch_core import config as environment

    environment.set_where_unset({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_TO_SAVE_S)})
    processes = str(nproc_per_node or launcher.num_gpus() or 2)
    options = launcher.parse(
        ["--module", f"{_PACKAGE}.{recipe}", *arguments],
        command="deepytorch train",
        default_processes=processes,
    )
    options.nproc_per_node = processes
    raise typer.Exit(launcher.launch(options))


def recipes() -> list[str]:
    """Names of the installed recipes, found without importing one."""
    spec = util.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        return []
    found = pkgutil.iter_modules(spec.submodule_search_locations)
    return sorted(module.name for module in found if not module.name.startswith("_"))


def find(recipe: str) -> None:
    """Raises ValueError, with the nearest name and the list, unless there is such a recipe."""
    known = recipes()
    if recipe in known:
        return
    if not known:
        raise ValueError(f"{_PACKAGE} is not here: recipes need deepytorch installed (pip install)")
    near = difflib.get_close_matches(recipe, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"no recipe {recipe!r}; {hint}there are: {', '.join(known)}")


def check_setting(text: str) -> str:
    """`text` if it has the form key=value; ValueError says so otherwise."""
    key, equals, _ = text.partition("=")
    if not (equals and key and not key.startswith("-")):
        raise ValueError(f"{text!r} is no setting: write key=value, such as steps=100")
    return text
