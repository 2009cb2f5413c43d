# SPDX-License-Identifier: Apache-2.0
"""Image data: a folder of images by class, or, without one, crops of one photograph.

The photograph is the one that matplotlib ships, so nothing is downloaded. As a classification task
each crop's class is the part of the photograph that it is from.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import console

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"}
GRID = 3  # the photograph is cut into GRID x GRID parts


@dataclass(frozen=True)
class ImageBatch:
    """float32 [batch, 3, side, side] of zero mean; int64 [batch] classes."""

    images: torch.Tensor
    classes: torch.Tensor

    def to(self, device: torch.device) -> "ImageBatch":
        """The same batch on ``device``."""
        return ImageBatch(
            self.images.to(device, non_blocking=True), self.classes.to(device, non_blocking=True)
        )

    def counts(self) -> torch.Tensor:
        """float32 [2]: images, twice."""
        return torch.tensor([len(self.images)] * 2, dtype=torch.float32, device=self.images.device)


def photograph() -> Image.Image:
    """A portrait, RGB, 512 x 600 pixels."""
    from matplotlib import cbook

    path = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    return Image.open(str(path)).convert("RGB")


@dataclass(frozen=True)
class PhotographParts:
    """Endless augmented crops of the photograph; the class is the part of its grid."""

    image: Image.Image
    image_size: int
    seed: int
    size: int

    @property
    def classes(self) -> list[str]:
        return [f"row {row}, column {column}" for row in range(GRID) for column in range(GRID)]

    @property
    def names(self) -> list[str]:
        return self.classes

    def draw(self, index: int, epoch: int) -> tuple[torch.Tensor, int]:
        """A crop from around the middle of part ``index`` mod 9, shifted and scaled at random."""
        chance = random.Random(f"{self.seed} {index} {epoch}")
        label = index % (GRID * GRID)
        width, height = self.image.width / GRID, self.image.height / GRID
        side = chance.uniform(0.6, 1.0) * min(width, height)
        left = (label % GRID) * width + chance.uniform(0, width - side)
        top = (label // GRID) * height + chance.uniform(0, height - side)
        crop = _resized(self.image, (left, top, left + side, top + side), self.image_size)
        return as_tensor(crop), label


@dataclass(frozen=True)
class FolderImages:
    """``<folder>/<class>/<image>``: a random crop for training, the middle for evaluation."""

    files: Sequence[tuple[Path, int]]
    classes: Sequence[str]
    image_size: int
    seed: int
    augment: bool = True
    others: Mapping[str, int] = field(default_factory=dict)  # what is there beside, see `listed`

    @property
    def size(self) -> int:
        return len(self.files)

    @property
    def names(self) -> list[str]:
        """Return the name of each image within the folder."""
        return [f"{self.classes[label]}/{path.name}" for path, label in self.files]

    def draw(self, index: int, epoch: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        image = read_image(path)
        if not self.augment:
            return as_tensor(centre_crop(image, self.image_size)), label
        chance = random.Random(f"{self.seed} {index} {epoch}")
        side = min(image.size) * chance.uniform(0.5, 1.0)
        left, top = (chance.uniform(0, extent - side) for extent in image.size)
        crop = _resized(image, (left, top, left + side, top + side), self.image_size)
        if chance.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return as_tensor(crop), label


def folder_images(
    folder: Path, image_size: int, seed: int, held_out: int
) -> tuple[FolderImages, FolderImages]:
    """Training images and every twentieth image of each class, kept out of training.

    Of those at most ``held_out``, of classes by chance; none where each class has one image.
    Raises RecipeError for a folder without classes or with an empty class.
    """
    if not folder.is_dir():
        raise RecipeError(f"data={folder} is no folder")
    there = sorted(path for path in folder.iterdir() if not _is_hidden(path))
    classes = [path.name for path in there if path.is_dir()]
    others = Counter(f"{_kind(path)} beside the classes" for path in there if not path.is_dir())
    if len(classes) < 2:
        raise RecipeError(
            f"data={folder} must have a folder of images for each class, and at least two; it has "
            f"{len(classes)}"
        )
    trained: list[tuple[Path, int]] = []
    kept: list[tuple[Path, int]] = []
    for label, name in enumerate(classes):
        files, beside = listed(folder / name)
        others += beside
        for number, path in enumerate(files):
            (kept if len(files) > 1 and number % 20 == 0 else trained).append((path, label))
    random.Random(seed).shuffle(kept)
    return (
        FolderImages(sorted(trained + kept[held_out:]), classes, image_size, seed, others=others),
        FolderImages(kept[:held_out], classes, image_size, seed, augment=False),
    )


def image_files(folder: Path) -> list[Path]:
    """The images in a folder, by name. RecipeError if there is none."""
    return listed(folder)[0]


def listed(folder: Path) -> tuple[list[Path], Counter[str]]:
    """The images in a folder, by name, and of each other kind how many are there.

    RecipeError if there is no image.
    """
    if not folder.is_dir():
        raise RecipeError(f"{folder} is no folder of images")
    there = sorted(path for path in folder.iterdir() if not _is_hidden(path))
    files = [path for path in there if is_image(path)]
    if not files:
        raise RecipeError(f"{folder} has no images ({', '.join(sorted(SUFFIXES))})")
    return files, Counter(_kind(path) for path in there if not is_image(path))


def say_others(others: Mapping[str, int]) -> None:
    """Print what lies beside the images; nothing if there is nothing."""
    kinds = sorted(others.items(), key=lambda item: (-item[1], item[0]))
    told = ", ".join(f"{number} x {kind}" for kind, number in kinds)
    if told:
        text = f"skipped     {sum(others.values())} other files and folders: {told}"
        console.print(text, highlight=False)


def is_image(path: Path) -> bool:
    """Whether the name is an image's; hidden files, as macOS writes beside others, are none."""
    return path.suffix.lower() in SUFFIXES and not _is_hidden(path)


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _kind(path: Path) -> str:
    return "folder" if path.is_dir() else path.suffix.lower() or "without a suffix"


def read_image(path: Path) -> Image.Image:
    """The image as it is looked at, in RGB, of several the first.

    RecipeError names a file that is none.
    """
    try:
        with Image.open(path) as image:
            if image.format == "TIFF" and image.mode in ("I", "F"):
                # Nothing says what its black and white are: Pillow would cut off at 255.
                raise ValueError("its pixels are of 32 bits: save it with 8 or 16")
            return _as_rgb(ImageOps.exif_transpose(image))
    except Exception as error:
        # Pillow's decoders hand on whatever a damaged file makes them raise: SyntaxError, ...
        reason = str(error) or type(error).__name__
        raise RecipeError(f"{path} cannot be read as an image: {reason}") from error


def _as_rgb(image: Image.Image) -> Image.Image:
    """8 bits a channel, what is transparent over white."""
    if image.mode.startswith("I;16"):
        # Pillow's own conversion cuts off at 255.
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """The largest square in the middle, ``size`` pixels wide."""
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return _resized(image, (left, top, left + side, top + side), size)


def _resized(image: Image.Image, box: tuple[float, float, float, float], size: int) -> Image.Image:
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


def as_tensor(image: Image.Image) -> torch.Tensor:
    """float32 [3, height, width] in -1 to 1."""
    pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1)
    return torch.from_numpy(pixels / 127.5 - 1)


def as_image(tensor: torch.Tensor) -> Image.Image:
    """The image of [3, height, width] in -1 to 1; other values are cut off."""
    pixels = ((tensor.float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def collate_images(drawn: list[tuple[torch.Tensor, int]]) -> ImageBatch:
    """A batch of what `draw` gives."""
    images, classes = zip(*drawn, strict=True)
    return ImageBatch(torch.stack(images), torch.tensor(classes))


def save_grid(images: Sequence[Image.Image], path: Path, columns: int = 4) -> None:
    """Write equal images side by side into one file."""
    width, height = images[0].size
    rows = -(-len(images) // columns)
    grid: Any = Image.new("RGB", (columns * width, rows * height))
    for number, image in enumerate(images):
        grid.paste(image, (number % columns * width, number // columns * height))
    grid.save(path)
