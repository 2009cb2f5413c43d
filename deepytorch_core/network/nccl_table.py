"""The table that NCCL's tuner plugin goes by: which algorithm was measured fastest, by size.

NCCL picks algorithm and protocol by a model of its own, which is off at some sizes and on some
networks. The plugin (`csrc/nccl_plugin`) overrides it where this table has an entry, and only with
what NCCL offers for the operation. Every node needs the same table: NCCL's choice must be the same
on all ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from deepytorch_core.base.file_permissions import UntrustedError, opened_data
from deepytorch_core.network.nccl_env import Choice

COLLECTIVES = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
VERSION = 1
FILE = "nccl_tuner.json"  # in the cache folder
BY_HAND = {
    *("NCCL_TUNER_PLUGIN", "NCCL_TUNER_CONFIG_FILE", "NCCL_ALGO", "NCCL_PROTO"),
    "DEEPYTORCH_NCCL_TABLE",
}
"""A user who sets one of these chooses by hand."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The choice for a collective of `first_bytes` to `last_bytes` (inclusive, as NCCL counts).

    `nodes` and `ranks` are the communicator's, 0 is any; `channels` 0 leaves them to NCCL. Raises
    ValueError for names or numbers that make no sense.
    """

    collective: str
    first_bytes: int
    last_bytes: int
    algorithm: str
    protocol: str
    nodes: int = 0
    ranks: int = 0
    channels: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("collective", COLLECTIVES),
            ("algorithm", ALGORITHMS),
            ("protocol", PROTOCOLS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: known are {', '.join(known)}")
        if not 0 <= self.first_bytes <= self.last_bytes < 1 << 63:
            raise ValueError(f"no sizes from {self.first_bytes} to {self.last_bytes} bytes")
        if min(self.nodes, self.ranks, self.channels) < 0:
            raise ValueError("nodes, ranks and channels must be 0 or more")


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Writes the table, the first entry that fits winning; whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"version": VERSION, "choices": [dataclasses.asdict(entry) for entry in entries]}
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(table, indent=1))
    fresh.replace(path)


def read(path: Path) -> list[Entry]:
    """The entries of a table. Raises OSError, or ValueError for what `write` did not write."""
    try:
        with opened_data(path) as file:
            table = json.load(file)
        if table["version"] != VERSION:
            raise ValueError(f"is of version {table['version']}, this release reads {VERSION}")
        return [Entry(**choice) for choice in table["choices"]]
    except UntrustedError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table for NCCL: {error}") from error


def plugin() -> Path:
    """Return where the plugin is installed. Raises RuntimeError when it is not."""
    from deepytorch_core import _core

    path = Path(_core.__file__).with_name("libnccl-tuner-deepytorch.so")
    if not path.exists():
        raise RuntimeError(f"{path} is missing: reinstall deepytorch-train")
    return path


def choose(path: Path, user_set: Collection[str]) -> Choice:
    """The variables that make NCCL go by the table at `path`; none where there is no such file.

    `DEEPYTORCH_NCCL_TABLE` among them is for the plugin. `user_set` are variables that are set.
    """
    if BY_HAND & set(user_set) or not path.exists():
        return Choice()
    try:
        number = len(read(path))
    except UntrustedError as error:
        raise ValueError(f"the table for NCCL is ignored: {error}") from None
    return Choice(
        {"NCCL_TUNER_PLUGIN": str(plugin()), "DEEPYTORCH_NCCL_TABLE": str(path)},
        (f"{number} measured choices in {path}",),
    )
