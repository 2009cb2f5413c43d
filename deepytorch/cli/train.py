"""`deepytorch train RECIPE ...`: a recipe of deepytorch.recipes under torchrun.

All that can be known to be wrong is said before a process starts, and without loading torch.
"""

import difflib
import logging
import os
import pkgutil
import typing
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Annotated, Any

import typer

from deepytorch.cli import console, help

if typing.TYPE_CHECKING:
    from deepytorch.recipes.base.options import RunOptions

_PACKAGE = "deepytorch.recipes"
# Told to end, a recipe finishes its step and saves, which takes large models minutes. torchrun
# kills it after 30 s unless told another time.
_TO_SAVE_S = 600


class _Command(help.Command):
    """`train --help` lists the recipes, `train RECIPE --help` the recipe's keys."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = [word for word in args if not word.startswith("-")]
        if "--help" in args and named:
            find(named[0])
            ctx.meta["recipe"] = named[0]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        if "recipe" in ctx.meta:
            _write_keys(formatter, ctx.meta["recipe"])
        else:
            _write_recipes(formatter)


def add_to(app: typer.Typer) -> None:
    examples = help.examples(
        "deepytorch train llama_sft --help                 # its keys",
        "deepytorch train llama_sft --compare",
        "deepytorch train llama_sft --nproc-per-node 2 steps=20",
        "deepytorch train llama_sft --dry-run model=path/to/model",
    )
    app.command(epilog=examples, cls=_Command)(train)


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
    options = _checked(recipe, config, arguments, compare=compare)
    if compare:
        arguments.insert(0, "--compare")
    if dry_run:
        arguments.insert(0, "--dry-run")
    if config is not None:
        arguments[:0] = ["--config", str(config)]

    from deepytorch.cli import launcher
    from deepytorch_core.base import config as environment
    from deepytorch_core.base.console import say

    num_gpus = launcher.num_gpus()
    options.check_device(has_gpu=num_gpus > 0)
    number = nproc_per_node or options.processes or num_gpus or 2
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_TO_SAVE_S)}
    if number > 1:  # else torchrun takes 1, and says so in five lines
        cores = len(os.sched_getaffinity(0))
        variables["OMP_NUM_THREADS"] = str(max(1, cores // number))
    environment.set_where_unset(variables)
    if not console.shows_tracebacks():
        # A rank that refuses its options has said why, and a crash has a table of its own.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    processes = str(number)
    started = launcher.parse(
        ["--module", f"{_PACKAGE}.{recipe}", *arguments],
        command="deepytorch train",
        default_processes=processes,
    )
    started.nproc_per_node = processes
    many = "1 process" if number == 1 else f"{number} processes"
    say(f"{recipe} starts in {many}: loading the libraries takes about 10 s, the first time longer")
    raise typer.Exit(launcher.launch(started))


def _checked(
    recipe: str, config: Path | None, words: Sequence[str], *, compare: bool
) -> "RunOptions":
    """The recipe's options; ValueError for keys, values and files that can't be right."""
    from deepytorch.recipes.base import paths
    from deepytorch.recipes.base.config import load_config
    from deepytorch.recipes.data import settings as _settings

    if config is not None:
        paths.refuse_missing("--config", config)
    options = load_config(_settings.OPTIONS[recipe], config or _yaml_of(recipe), words)
    options.check_start(compare=compare)
    return options


def _yaml_of(recipe: str) -> Path:
    from deepytorch import recipes

    return Path(recipes.__path__[0]) / "configs" / f"{recipe}.yaml"


def _write_recipes(formatter: Any) -> None:
    from deepytorch.recipes import DESCRIPTIONS

    with formatter.section("Recipes"):
        formatter.write_dl([(name, DESCRIPTIONS[name]) for name in recipes()])


def _write_keys(formatter: Any, recipe: str) -> None:
    from deepytorch.recipes import DESCRIPTIONS
    from deepytorch.recipes.data import settings as _settings
    from deepytorch.recipes.runner import help as _help

    formatter.write_paragraph()
    formatter.write_text(f"{recipe}: {DESCRIPTIONS[recipe]}. Its keys, each set as KEY=VALUE:")
    for title, keys in _help.sections(_settings.OPTIONS[recipe], _yaml_of(recipe)):
        with formatter.section(title.capitalize()):
            formatter.write_dl(
                [
                    (key.name, f"{key.meaning}  ({key.kind})  [{key.default}]".strip())
                    for key in keys
                ]
            )


def recipes() -> list[str]:
    """Names of the installed recipes, found without importing one."""
    spec = util.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        return []
    found = pkgutil.iter_modules(spec.submodule_search_locations)
    return sorted(
        module.name for module in found if not module.ispkg and not module.name.startswith("_")
    )


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
