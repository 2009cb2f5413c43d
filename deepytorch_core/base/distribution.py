"""The package's name for pip, which is not the name that programs import, and its version."""

from __future__ import annotations

from importlib import metadata

NAME = "deepytorch-train"
IMPORTED = "deepytorch"
"""On the package index this name is somebody else's empty package."""

REINSTALL = f"pip install --force-reinstall --no-deps {NAME}"


def version() -> str:
    """deepytorch's version, or "source" when it runs from a tree that is not installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return "source"
