"""Make pictures on the spot, the same each time, in the layouts that scripts read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED = 0
MNIST_ROWS = {"full": (60_000, 10_000), "small": (2_048, 256)}


def jpegs(place: Callable[[int], Path], count: int, pixels: int) -> None:
    """Write `count` square JPEG pictures of smooth noise, the one of each number at its `place`."""
    import numpy
    from PIL import Image

    generator = numpy.random.default_rng(SEED)
    for number in range(count):
        coarse = generator.integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
        path = place(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((pixels, pixels), Image.Resampling.BILINEAR).save(path)


def image_folder(folder: Path, *, classes: int, each: int, pixels: int) -> None:
    """Write a folder of pictures for each class, as torchvision's ImageFolder reads them."""

    def place(number: int) -> Path:
        return folder / f"class{number % classes:03d}" / f"{number:06d}.jpg"

    jpegs(place, classes * each, pixels)


def mnist(folder: Path, size: str) -> None:
    """Write MNIST's four files with noise for pictures, as torchvision.datasets.MNIST reads them.

    Their checksums are not MNIST's: torchvision looks at the names alone.
    """
    import numpy

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    generator = numpy.random.default_rng(SEED)
    for name, rows in zip(("train", "t10k"), MNIST_ROWS[size], strict=True):
        pictures = generator.integers(0, 256, (rows, 28, 28), dtype=numpy.uint8)
        labels = generator.integers(0, 10, rows, dtype=numpy.uint8)
        _idx(raw / f"{name}-images-idx3-ubyte", pictures)
        _idx(raw / f"{name}-labels-idx1-ubyte", labels)


def _idx(path: Path, values: Any) -> None:
    """Write an array of bytes in MNIST's format."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.tobytes())
