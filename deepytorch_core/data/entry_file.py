"""One sample's entry of an `EncoderCache` as a file: written whole, believed only if checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from deepytorch_core.base.file_permissions import UntrustedError, opened_data, why_not_believed

# For the user and the group, as files of settings are; less where the umask says so.
_FILE_MODE, FOLDER_MODE = 0o664, 0o775


def write(path: Path, key: str, entry: dict[str, torch.Tensor]) -> None:
    """Writes the entry of `key`; the file appears whole or not at all. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
        with open(temporary, "wb", opener=_open) as file:
            torch.save({"key": key, "entry": entry}, file)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # of torch's writer, where the disk is full
        temporary.unlink(missing_ok=True)
        raise OSError(str(error).partition("\n")[0]) from error


def read(path: Path, key: str) -> dict[str, torch.Tensor]:
    """Read what `write` wrote for `key`. Raises ValueError for all else, OSError where it must."""
    if (untrusted := why_not_believed(path.parent)) is not None:
        raise ValueError(untrusted)
    try:
        with opened_data(path) as file:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, UntrustedError):
        raise
    except Exception as error:  # torch raises many kinds for what is no file of its own
        raise ValueError(str(error).partition("\n")[0]) from error
    if not isinstance(found, dict) or set(found) != {"key", "entry"}:
        raise ValueError("it is no entry of a cache")
    if found["key"] != key:
        raise ValueError("it is the entry of another sample")
    return _checked(found["entry"])


def _checked(entry: Any) -> dict[str, torch.Tensor]:
    if not isinstance(entry, dict) or not entry:
        raise ValueError("it holds no tensors")
    for name, value in entry.items():
        plain = type(value) is torch.Tensor and value.layout == torch.strided
        if not isinstance(name, str) or not plain or value.requires_grad:
            raise ValueError(f"{name!r} is no plain tensor")
        if value.device.type != "cpu":
            raise ValueError(f"{name!r} is on {value.device}")
    return entry


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)
