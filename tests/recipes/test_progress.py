# SPDX-License-Identifier: Apache-2.0
"""How far a recipe is: a bar on a terminal alone, some lines elsewhere."""

import io

import pytest
from rich.console import Console

from deepytorch.recipes.base import run


@pytest.mark.parametrize(("is_tty", "kind"), [(True, "bar"), (False, "lines")])
def test_forced_colours_make_no_bar_in_a_log(monkeypatch, is_tty, kind):
    class Stream(io.StringIO):
        def isatty(self):
            return is_tty

    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = Stream()
    monkeypatch.setattr(run, "console", Console(file=stream, width=80))
    with run.StepProgress(100, enabled=True) as progress:
        for step in range(1, 101):
            progress.update(step, "loss 1")
    shown = stream.getvalue()
    if kind == "lines":
        lines = shown.splitlines()
        assert 2 <= len(lines) <= 30
        assert lines[0].startswith("step 1/100  loss 1")
        assert lines[-1].startswith("step 100/100  loss 1")
    else:
        assert "100/100" in shown
        assert "step 1/100" not in shown
