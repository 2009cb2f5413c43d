"""Describe a public training script: its origin, its arguments and its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path, PurePosixPath
from typing import Literal

Size = Literal["full", "small"]
"""`full` is for a GPU; `small` shrinks model and data until a CPU trains them in seconds."""
SIZES: tuple[Size, ...] = ("full", "small")
OUT = "bench-out"
"""Stands for {out}: in the folder where the script runs, a view that goes with the run."""

Prepare = Callable[[Path, Size], None]


@dataclass(frozen=True)
class Peer:
    """Names another way to train a script's model on its rows, without deepytorch.

    Args:
        name: what makes it fast.
        arguments: what the script is given beside its own ones; the last of a name counts.
    """

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class TokenWork:
    """Counts a language model's operations on matrices in a training step, recomputation left out.

    Args:
        of_token: operations for each token.
        of_pair: operations for each pair of tokens of one sequence, a token with itself included.
    """

    of_token: float
    of_pair: float


@dataclass(frozen=True, kw_only=True)
class Script:
    """Describes one script with its arguments; each run trains until its time is over.

    In arguments, the folder and variables, {data} stands for what `prepare` filled. There {out}
    stands for a folder that goes with the run, and {checkout} for the repository.

    Args:
        name: of the row.
        repository: OWNER/NAME on GitHub.
        commit: at which the script was read.
        path: of the script, from the repository's top.
        arguments: as the script's documentation has them, for size full.
        small: all arguments for size small.
        prepare: makes data, tokenizer and configuration in a folder: the same each time, offline.
        goal: the speed-up over stock to reach; about 1 is to be no slower.
        packages: what must be installed, by the names to import.
        folder: where the script runs; empty: where it lies.
        variables: of the environment.
        is_distributed: whether torchrun may start it with several ranks, on CPUs, too.
        peer: the fastest other way that is public, which is measured beside; for size full.
        work: of its model at size full; None: no rate of operations is told.
    """

    name: str
    repository: str
    commit: str
    path: str
    arguments: tuple[str, ...]
    small: tuple[str, ...]
    prepare: Prepare
    goal: float = 1.0
    packages: tuple[str, ...] = ()
    folder: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    is_distributed: bool = False
    peer: Peer | None = None
    work: TokenWork | None = None

    @property
    def checkout(self) -> str:
        """Return the name of the repository's folder."""
        return PurePosixPath(self.repository).name

    def missing(self) -> tuple[str, ...]:
        """Return the packages that are not installed."""
        return tuple(package for package in self.packages if util.find_spec(package) is None)

    def how_to_get(self) -> str:
        """Return the command lines that make the checkout."""
        return (
            f"git clone https://github.com/{self.repository} && "
            f"git -C {self.checkout} checkout {self.commit}"
        )


@dataclass(frozen=True)
class ScriptCall:
    """Describes how a script is run on this machine."""

    script: Path
    folder: Path
    arguments: tuple[str, ...]
    variables: Mapping[str, str]


def call(
    script: Script, size: Size, checkout: Path, data: Path, more: Sequence[str] = ()
) -> ScriptCall:
    """Fill the places of this machine in; `more` are further arguments."""
    places = {"data": str(data), "out": OUT, "checkout": str(checkout)}
    path = checkout / script.path
    chosen = script.arguments if size == "full" else script.small
    return ScriptCall(
        script=path,
        folder=Path(script.folder.format(**places)) if script.folder else path.parent,
        arguments=filled((*chosen, *more), places),
        variables={name: text.format(**places) for name, text in script.variables.items()},
    )


def filled(arguments: Sequence[str], places: Mapping[str, str]) -> tuple[str, ...]:
    """Return the arguments with places for their placeholders."""
    return tuple(argument.format(**places) for argument in arguments)
