# SPDX-License-Identifier: Apache-2.0
"""Loading models: whether the hub can be reached, found out once, and what is wrong if it fails."""

import functools
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import console

_PATIENCE_S = 5.0


def loading_options(model: str) -> dict[str, Any]:
    """Keywords of ``from_pretrained``: offline, a hub id is looked up among cached copies only."""
    return {} if Path(model).exists() or is_online() else {"local_files_only": True}


@functools.cache
def is_online() -> bool:
    """Whether the hub answers, with proxies as the environment says; one line if it does not."""
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_PATIENCE_S).close()
    except urllib.error.HTTPError:
        return True  # an answer, if not the best one
    except OSError:
        if not dist.is_initialized() or dist.get_rank() == 0:
            console.print(
                f"offline     {constants.ENDPOINT} can't be reached: using cached copies",
                highlight=False,
            )
        return False
    return True


@contextmanager
def whole_files(folder: Path) -> Iterator[None]:
    """Around loading from ``folder``; RecipeError naming the safetensors file that is damaged."""
    try:
        yield
    except SafetensorError as error:
        raise RecipeError(
            f"{_damaged_in(folder)} is no whole safetensors file ({reason(error)}): fetch it "
            "again, with `git lfs pull` if it is a pointer of git-lfs"
        ) from error


def _damaged_in(folder: Path) -> str:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            return str(path)
    return f"a file of {folder}"


def reason(error: Exception) -> str:
    """The error's text on one line, cut where it goes on about everything it tried."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."
