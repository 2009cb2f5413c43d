"""Pages as headless Chromium shows them, and whether a picture still looks like another.

Fonts, anti-aliasing and the browser's version differ between machines. So pictures are compared as
somebody sees them who stands back. The mean colours of cells count, and each cell may have moved a
few pixels. Every page is shown in DejaVu Sans, which .ci/system installs with the browser.
"""

from __future__ import annotations

# ruff: noqa: TID251
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

CELL = 12  # pixels
MOVED = 4
# A cell that differs by more than this (of 255, in one colour) is another one.
CELL_LIMIT = 40
# And so many may be.
MOST_OTHER = 12

_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>
<dir>/usr/share/fonts</dir><cachedir prefix="xdg">fontconfig</cachedir>
<match target="pattern"><test name="family" compare="not_eq"><string>monospace</string></test>
<edit name="family" mode="assign" binding="strong"><string>DejaVu Sans</string></edit></match>
<match target="pattern"><test name="family"><string>monospace</string></test>
<edit name="family" mode="assign" binding="strong"><string>DejaVu Sans Mono</string></edit></match>
</fontconfig>
"""


def browser() -> str:
    """Chromium's command. Raises RuntimeError when there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError("no Chromium to look at pages with: install the package chromium")


def shoot(page: Path, picture: Path, *, width: int, height: int, dark: bool = False) -> None:
    """Show a page in a window and keep what is seen as PNG, in few colours."""
    with tempfile.TemporaryDirectory() as folder:
        fonts = Path(folder) / "fonts.conf"
        fonts.write_text(_FONTS)
        raw = Path(folder) / "raw.png"
        command = [
            *(browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1"),
            *("--disable-lcd-text", "--font-render-hinting=none", "--virtual-time-budget=3000"),
            *(f"--user-data-dir={folder}/profile", f"--window-size={width},{height}"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *(f"--screenshot={raw}", page.absolute().as_uri()),
        ]
        environment = {**os.environ, "FONTCONFIG_FILE": str(fonts), "XDG_CACHE_HOME": folder}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        if done.returncode or not raw.exists():
            raise RuntimeError(f"{browser()} failed ({done.returncode}): {done.stderr[-2000:]}")
        keep(Image.open(raw), picture)


def keep(image: Image.Image, picture: Path) -> None:
    """Write a picture in 96 colours, which is a third of its size."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    few = image.convert("RGB").quantize(96, method=Image.Quantize.MAXCOVERAGE, dither=0)
    few.save(picture, optimize=True)


def means(image: Image.Image) -> np.ndarray:
    """The mean colour of the cell that begins at each pixel: [height, width, 3], 0 to 255."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64)
    sums = np.pad(pixels, ((1, CELL), (1, CELL), (0, 0)), mode="edge").cumsum(0).cumsum(1)
    boxes = sums[CELL:, CELL:] - sums[:-CELL, CELL:] - sums[CELL:, :-CELL] + sums[:-CELL, :-CELL]
    return boxes[: pixels.shape[0], : pixels.shape[1]] / CELL**2


def differing(picture: Image.Image, other: Image.Image) -> np.ndarray:
    """Return which cells of `picture` have no like in `other`, there or near it: [rows, columns].

    Parts that move out of the window can't be found: cells at its lower and right edge don't count.
    """
    width, height = (CELL * ((size - MOVED) // CELL) for size in picture.size)
    ours = means(picture)[:height:CELL, :width:CELL]
    theirs = np.pad(means(other), ((MOVED, MOVED), (MOVED, MOVED), (0, 0)), mode="edge")
    nearest = np.full(ours.shape[:2], np.inf)
    for down in range(0, 2 * MOVED + 1, 2):
        for right in range(0, 2 * MOVED + 1, 2):
            moved = theirs[down : down + height : CELL, right : right + width : CELL]
            nearest = np.minimum(nearest, np.abs(ours - moved).max(axis=2))
    return nearest > CELL_LIMIT


def difference(picture: Image.Image, other: Image.Image) -> str:
    """Return what tells one picture from another, in words; "" if they look the same."""
    if any(abs(a - b) > CELL for a, b in zip(picture.size, other.size, strict=True)):
        return f"sizes are {picture.size} and {other.size}"
    size = tuple(min(pair) for pair in zip(picture.size, other.size, strict=True))
    picture, other = picture.crop((0, 0, *size)), other.crop((0, 0, *size))
    other_cells = differing(picture, other) | differing(other, picture)
    count = int(other_cells.sum())
    if count <= MOST_OTHER:
        return ""
    rows, columns = np.nonzero(other_cells)
    box = [int(CELL * value) for value in (columns.min(), rows.min(), columns.max(), rows.max())]
    return f"{count} of {other_cells.size} cells differ, all within the pixels {box}"
