"""A hang or two in scripts that others wrote; `make test-hangs` plants many. Also: what plants."""

from __future__ import annotations

import ast
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import third_party
from third_party import EDITS, SCRIPTS, Case, edited, is_right, places

SOURCE = '''\
"""Something."""
from __future__ import annotations
import torch

class Model:
    def __init__(self):
        """Makes it."""
        if torch:
            self.a = 1
        elif self:
            self.a = 2

def unused():
    gather(1)

def main(x):
    x = gather(
        x,
    )
    y = gather(x, 2)
    reduce(y)
    for each in y:
        print(each)

main(Model())
'''


def lines_of(found: list[ast.stmt]) -> list[int]:
    return [node.lineno for node in found]


def test_places_are_statements_of_functions_that_are_used() -> None:
    assert lines_of(places(SOURCE, "any")) == [8, 9, 11, 17, 20, 21, 22, 23]
    assert lines_of(places(SOURCE, "collective")) == [17, 20, 21]
    assert lines_of(places(SOURCE, "skipped")) == [20, 21]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_an_edit_knows_its_line(edit: third_party.Edit) -> None:
    found = places(SOURCE, edit.at)
    text = edited(SOURCE, edit, random.Random(edit.name).sample(found, 2))
    lines = text.splitlines()
    numbers = [
        int(digits) for digits in re.findall(r"^ +if plant\.due\((\d+)\):$", text, re.MULTILINE)
    ]
    assert len(numbers) == 2
    for number in numbers:
        assert f"plant.due({number})" in lines[number - 2]
        expected = edit.lines.splitlines()[0] if edit.lines else ""
        assert expected in lines[number - 1]
    assert lines[2].startswith("import plant;")
    # Without the plant it is the same program.
    kept = [line for line in lines if "plant." not in line]
    if edit.at == "any" and edit.lines.startswith("plant."):
        assert "\n".join(kept) + "\n" == SOURCE.replace(
            "import torch", third_party._IMPORT + "import torch"
        )


def test_left_out_is_the_collective_alone() -> None:
    (skips,) = [edit for edit in EDITS if edit.at == "skipped"]
    text = edited(SOURCE, skips, places(SOURCE, "skipped"))
    assert "        y = x\n    else: y = gather(x, 2)\n" in text
    assert "        pass\n    else: reduce(y)\n" in text


SAYS = {"kind": "never entered", "ranks": [1], "sentence": "rank 1 is in copy.py:7 sleep for 3 s"}


@pytest.mark.parametrize(
    ("verdict", "name", "right"),
    [
        (SAYS, "sleeps", True),
        (SAYS, "an operation more", False),
        ({**SAYS, "ranks": [0]}, "sleeps", False),
        ({**SAYS, "ranks": [0, 1]}, "sleeps", False),
        ({**SAYS, "kind": "no hang"}, "sleeps", False),
        ({**SAYS, "sentence": "rank 1 is in copy.py:77 sleep"}, "sleeps", False),
        ({**SAYS, "kind": "mismatch", "ranks": [0, 1]}, "an operation more", True),
        ({**SAYS, "kind": "mismatch", "ranks": [0, 2]}, "an operation more", False),
        ({**SAYS, "kind": "gone"}, "exits", True),
        ({**SAYS, "kind": "raised", "ranks": []}, "exits", False),
    ],
)
def test_what_is_right(verdict: dict[str, Any], name: str, right: bool) -> None:
    (edit,) = [edit for edit in EDITS if edit.name == name]
    assert is_right(edit, verdict, 1, "copy.py:7 ") is right


def test_errors_blame_who_each_of_them_names(tmp_path: Path) -> None:
    (tmp_path / "log0").write_text("[rank0]: RuntimeError: rank 1 (node a) never entered it\n")
    (tmp_path / "log2").write_text("DistBackendError: ranks 0 and 1 differ\nValueError: after\n")
    assert third_party._raised(tmp_path, [0, 2], 1)["ranks"] == [1]
    (tmp_path / "log2").write_text("[rank2]: RuntimeError: on rank 11 of 12\n")
    assert third_party._raised(tmp_path, [0, 2], 1)["ranks"] == []


def test_every_script_is_as_it_was_when_its_changes_were_made() -> None:
    for script in SCRIPTS:
        ast.parse(script.source())
        assert len(places(script.source(), "any")) > third_party.PLACES
        assert places(script.source(), "skipped")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("empty queue", "native"),
        pytest.param("exits", "delegated", marks=pytest.mark.extended),
    ],
)
def test_a_script_of_others_that_hangs(name: str, how: str) -> None:
    (edit,) = [edit for edit in EDITS if edit.name == name]
    found = third_party.run_one(Case(edit, SCRIPTS[0], how, seed=5))
    assert found["right"], found
