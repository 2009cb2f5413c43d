"""A class's name says which one it is: no two public classes of the packages have the same."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("deepytorch_core", "deepytorch", "integrations", "recipes")

# Names that several modules have to have, each with the reason.
SHARED = {
    "Compression": "Horovod has it for torch and for TensorFlow, and scripts say hvd.Compression"
}


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for folder in FOLDERS:
        paths = sorted((ROOT / folder).rglob("*.py"))
        assert paths, folder
        for path in paths:
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(path.relative_to(ROOT).as_posix())
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in shared.items() if name not in SHARED} == {}
    assert set(SHARED) <= set(shared), "a name that is no longer shared"
