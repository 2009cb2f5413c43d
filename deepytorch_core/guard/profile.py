"""Decisions kept between runs, in the profile that the native tuner writes too.

The file is JSON for people to read. Ours are its list `decisions`, and `notes`: what runs met that
decided nothing, for people alone. What else is in it stays. It is replaced in one step; of two
processes that write in the same instant the later wins, and what the other had found is measured
again some day.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepytorch_core.base import config, distribution
from deepytorch_core.base.console import say_once
from deepytorch_core.base.file_permissions import UntrustedError, opened_data

# As in csrc/tuner/profile.hpp: a profile of another format is left alone.
_FORMAT = 1
# The oldest go when there are more.
_MOST_DECISIONS = 500
_MOST_NOTES = 100
_given_up: set[Path] = set()  # that could not be written
_told: set[str] = set()  # what was said, each once


def key(what: str, facts: Mapping[str, Any], *, world_size: int) -> dict[str, Any]:
    """Return the key of a decision: `facts` of JSON's types, this machine and these versions."""
    from deepytorch_core.base import provenance

    return {
        "what": what,
        "machine": provenance.machine_info()["name"],
        "world_size": world_size,
        "deepytorch": distribution.version(),
        "torch": str(torch.__version__),
        **facts,
    }


def fingerprint(module: nn.Module) -> str:
    """The same for modules of the same structure: classes, names, shapes and dtypes."""
    found = hashlib.sha256()
    for name, submodule in module.named_modules():
        found.update(
            f"{name}:{type(submodule).__module__}.{type(submodule).__qualname__}\n".encode()
        )
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 has a part of it here
        found.update(f"{name}:{parameter.dtype}{tuple(shape)}\n".encode())
    return found.hexdigest()[:16]


def entries() -> list[dict[str, Any]]:
    """All decisions of the profile, the oldest first."""
    return [entry for entry in _of(_read()) if isinstance(entry.get("chosen"), str)]


def notes() -> list[dict[str, Any]]:
    """All notes of the profile, the oldest first; they look like decisions, and are none."""
    return [entry for entry in _of(_read(), "notes") if isinstance(entry.get("chosen"), str)]


def _of(document: Mapping[str, Any], name: str = "decisions") -> list[dict[str, Any]]:
    """List the entries that are decisions, or notes, at all; people may write to the file."""
    found = document.get(name, [])
    if not isinstance(found, list):
        return []
    return [
        entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("for"), dict)
    ]


def find(wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """The decision that the profile holds for `wanted`, or None."""
    return next((entry for entry in reversed(entries()) if entry["for"] == dict(wanted)), None)


def keep(wanted: Mapping[str, Any], decision: Mapping[str, Any]) -> None:
    """Write a decision for `wanted`; a profile that can't be written is only reported.

    A note about the same goes: it has been decided since.
    """
    document = _read()
    if (found := _without(document, "notes", wanted)) != document.get("notes", []):
        document["notes"] = found
    others = _without(document, "decisions", wanted)
    document["decisions"] = [*others, {"for": dict(wanted), **decision}][-_MOST_DECISIONS:]
    _write(document)


def note(about: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    """Write what a run has met that decided nothing, in place of the last note about the same.

    `find` never gives it.
    """
    document = _read()
    others = _without(document, "notes", about)
    document["notes"] = [*others, {"for": dict(about), **entry}][-_MOST_NOTES:]
    _write(document)


def _without(document: Mapping[str, Any], name: str, key: Mapping[str, Any]) -> list[Any]:
    return [entry for entry in _of(document, name) if entry["for"] != dict(key)]


def _write(document: dict[str, Any]) -> None:
    path = config.profile_path()
    if path is None or path in _given_up or document.get("format", _FORMAT) != _FORMAT:
        return
    document = {"format": _FORMAT, "groups": [], **document}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        _given_up.add(path)
        with contextlib.suppress(OSError):
            temporary.unlink()
        _tell(f"the profile {path} can't be written: {error}")


def _read() -> dict[str, Any]:
    path = config.profile_path()
    if path is None:
        return {}
    try:
        with opened_data(path) as file:
            document = json.load(file)
        if not isinstance(document, dict) or not isinstance(document.get("decisions", []), list):
            raise ValueError("it is no object with a list of decisions")
    except FileNotFoundError:
        return {}
    except UntrustedError as error:
        _tell(f"the profile is ignored: {error}")
        return {"format": None}  # nor is it written
    except (OSError, ValueError, RecursionError) as error:
        _tell(f"the profile {path} can't be read, nothing is taken from it: {error}")
        return {}
    return document if document.get("format") == _FORMAT else {"format": document.get("format")}


def _tell(text: str) -> None:
    if text not in _told:
        _told.add(text)
        say_once(text, level="warning")
