# SPDX-License-Identifier: Apache-2.0
"""Images of a class, made once by all ranks: the prior of DreamBooth."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.file_transfer import first_beside
from deepytorch.recipes.base.run import Process, all_of, console, refuse_file, together
from deepytorch.recipes.data import images


def made_in(
    folder: Path,
    count: int,
    make: Callable[[int], Any],
    process: Process,
    option: str = "class_data",
) -> list[Path]:
    """``count`` images in ``folder``, of which ranks that see it share what is missing.

    Collective. ``make`` gives the same image of a number to whoever asks, so that nodes with
    folders of their own train on the same ones. ``option`` is the one that names the folder.
    Raises RecipeError, on every rank, if one fails.
    """
    together(lambda: refuse_file(option, folder), process)
    there = together(lambda: {path.name for path in _found(folder)}, process)
    if min(all_of(len(there), process)) >= count:  # it may be one that nobody may write to
        if process.is_main and len(there) > count:
            told = f"class images: using {count} of {len(there)} in {folder}"
            console.print(f"{told}: num_class_images={count}", highlight=False)
        return together(lambda: images.image_files(folder)[:count], process)
    try:
        first = first_beside(folder, process)
    except RecipeError as error:
        raise RecipeError(
            f"{option}: the class images can't be written to {folder}: {error}. Name a folder to "
            f"write to, or one with num_class_images={count} images"
        ) from error
    mates = [rank for rank, other in enumerate(all_of(first, process)) if other == first]
    free = [number for number in range(count) if _name(number) not in there]
    missing = free[: max(0, count - len(there))]
    if process.is_main and missing:
        told = f"class images: making {len(missing)} of {count} in {folder} (found {len(there)})"
        console.print(told, highlight=False)

    def share() -> None:
        for number in missing[mates.index(process.rank) :: len(mates)]:
            # Named when it is whole: a run that is killed leaves no half image to train on.
            # Another run may make it in the same folder.
            partial = folder / f"{_name(number)}.{secrets.token_hex(4)}.partial"
            make(number).save(partial, format="PNG")
            partial.replace(folder / _name(number))

    together(share, process)
    return together(lambda: images.image_files(folder)[:count], process)


def _name(number: int) -> str:
    return f"made-{number:04d}.png"


def _found(folder: Path) -> list[Path]:
    there = folder.iterdir() if folder.is_dir() else ()
    return [path for path in there if images.is_image(path)]
