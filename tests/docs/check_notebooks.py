"""The notebooks run from top to bottom, and what they assert holds: `make test-docs`.

`python tests/docs/check_notebooks.py [NAME ...]` writes their output into them, for the site.
"""

from __future__ import annotations

# ruff: noqa: TID251
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import page

NOTEBOOKS = sorted((page.DOCS.parent / "notebooks").glob("*.ipynb"))


def execute(path: Path, folder: Path) -> Any:
    """The notebook with its output, run in `folder`; raises the error of a cell that fails."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = page.environment(folder) | {"PATH": own}
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute(env=environment)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path) -> None:
    notebook = execute(path, tmp_path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)


def write(path: Path) -> None:
    """Keep what the cells print, and nothing that differs from run to run beside it."""
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        notebook = execute(path, Path(folder))
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            # Warnings are of versions, not of the subject.
            cell.outputs = [shown for shown in cell.outputs if shown.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            if "text" in output:
                text = output["text"].replace(folder, "...")
                text = re.sub(r"/[\w./-]*/site-packages/", ".../site-packages/", text)
                # A cell's commands see a terminal, and write bold into it.
                text = re.sub(r"\x1b\[[\d;]*m", "", text)
                output["text"] = "\n".join(line.rstrip() for line in text.split("\n"))
    nbformat.write(notebook, path)


if __name__ == "__main__":
    chosen = set(sys.argv[1:])
    for file in NOTEBOOKS:
        if not chosen or file.stem in chosen:
            write(file)
