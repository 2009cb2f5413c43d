"""Examples are counted: what hypothesis gives a test, and no call besides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st


def test_every_example_counts(pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert conftest is not None
    seen = []

    @settings(max_examples=23, database=None, deadline=None)
    @given(st.integers())
    @example(7)
    def check(value: int) -> None:
        seen.append(value)

    examples = conftest.Examples()
    examples.count(SimpleNamespace(obj=check))
    examples.count(SimpleNamespace(obj=len))  # a test without examples
    check()
    assert 7 in seen
    assert examples.number == len(seen) == 24
