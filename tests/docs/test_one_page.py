"""One page of the quick start does what it says; `make test-docs` does the others too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import page


def test_horovod_page(tmp_path: Path) -> None:
    assert page.run(page.DOCS / "quickstart/horovod.md", tmp_path) == 1
