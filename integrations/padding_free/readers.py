"""Readers of a model's output: a framework's code that leaves padding out, or anybody else.

Outputs of a packed row are zero at padding, where a padded batch has other values. The frameworks'
trainers leave padding out of all that they compute: `tests/integrations` compare them with stock.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet

# Modules whose functions take no per-token output at padding, by the versions that are known.
_KNOWN = {"transformers.trainer": ("transformers", ">=4.55,<6"), "trl": ("trl", ">=1.10,<2")}
# They wrap a model's forward pass, and hand its output on.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "deepspeed")
# They read for whoever has called them.
_BETWEEN = (
    *("deepytorch", "deepytorch_core", "torch", "transformers", "peft", "accelerate"),
    *("collections", "contextlib", "functools", "copy", "typing", "_collections_abc"),
)


def unknown() -> str | None:
    """The function that reads an output here, by its module and name; None for a known one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if _is_within(module, _WRAPPERS) or any(_is_known(module, name) for name in _KNOWN):
            return None
        if not _is_within(module, _BETWEEN):
            code = frame.f_code
            return f"{module}.{getattr(code, 'co_qualname', code.co_name)}"
        frame = frame.f_back
    return "code without a frame"


def _is_within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _is_known(module: str, name: str) -> bool:
    # transformers.trainer, trainer_pt_utils, trainer_seq2seq: a beginning, not a package.
    if not module.startswith(name):
        return False
    distribution, versions = _KNOWN[name]
    if distribution not in _versions:
        _versions[distribution] = _satisfies(distribution, versions)
    return _versions[distribution]


_versions: dict[str, bool] = {}


def _satisfies(distribution: str, versions: str) -> bool:
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return SpecifierSet(versions).contains(found.partition("+")[0], prereleases=True)
