"""Facts of Horovod's installation that scripts and libraries ask for, and small helpers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


def check_extension(*names: str) -> None:
    """Return: what Horovod looks for, its compiled library, is not needed here."""
    del names


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Return: nothing here was compiled for one version of `name`, "pytorch" for instance."""
    del name, version, exception


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Whether torch sees a GPU."""
    del ext_base_name, verbose
    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[_T], parts: int) -> list[Sequence[_T]]:
    """Consecutive parts of nearly the same length; the first ones have one more if uneven."""
    each, more = divmod(len(items), parts)
    ends = [(part + 1) * each + min(part + 1, more) for part in range(parts)]
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def is_iterable(value: Any) -> bool:
    """Whether it can be gone through."""
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")
