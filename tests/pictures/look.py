"""Pages as headless Chromium shows them, and whether a picture still looks like another.

Fonts, anti-aliasing and the browser's version differ between machines, so pictures are compared
as somebody sees them who stands back: cell by cell of 8 by 8 pixels, and a cell may have moved to
its neighbour. Every page is shown in DejaVu Sans, which .ci/system installs with the browser.
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

CELL = 8
# A cell that differs by more than this (of 255, in one colour) is another one.
CELL_LIMIT = 28
# And so many of 1000 may be.
MOST_OTHER = 6

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
            *("--disable-lcd-text", "--virtual-time-budget=3000"),
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


def cells(image: Image.Image) -> np.ndarray:
    """The mean colour of each cell: [rows, columns, 3], 0 to 255."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64)
    rows, columns = pixels.shape[0] // CELL, pixels.shape[1] // CELL
    cut = pixels[: rows * CELL, : columns * CELL]
    return cut.reshape(rows, CELL, columns, CELL, 3).mean(axis=(1, 3))


def differing(one: Image.Image, other: Image.Image) -> np.ndarray:
    """Which cells of `one` have no like in `other`, there or next to it: [rows, columns]."""
    ours, theirs = cells(one), cells(other)
    padded = np.pad(theirs, ((1, 1), (1, 1), (0, 0)), mode="edge")
    nearest = np.full(ours.shape[:2], np.inf)
    for down in range(3):
        for right in range(3):
            moved = padded[down : down + ours.shape[0], right : right + ours.shape[1]]
            nearest = np.minimum(nearest, np.abs(ours - moved).max(axis=2))
    return nearest > CELL_LIMIT


def difference(one: Image.Image, other: Image.Image) -> str:
    """What tells one picture from another, in words; "" where they look the same."""
    if any(abs(a - b) > CELL for a, b in zip(one.size, other.size, strict=True)):
        return f"sizes are {one.size} and {other.size}"
    size = tuple(min(pair) for pair in zip(one.size, other.size, strict=True))
    one, other = one.crop((0, 0, *size)), other.crop((0, 0, *size))
    other_cells = differing(one, other) | differing(other, one)
    share = 1000 * other_cells.mean()
    if share <= MOST_OTHER:
        return ""
    rows, columns = np.nonzero(other_cells)
    box = [int(CELL * value) for value in (columns.min(), rows.min(), columns.max(), rows.max())]
    return f"{share:.0f} of 1000 cells differ (at most {MOST_OTHER}), all within the pixels {box}"
