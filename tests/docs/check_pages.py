"""Pages whose commands run on any machine do what they say: `make test-docs`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import page

PAGES = [*sorted((page.DOCS / "quickstart").glob("*.md")), page.DOCS / "method.md"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page(path: Path, tmp_path: Path) -> None:
    assert page.run(path, tmp_path) > 0, f"{path} runs nothing"
