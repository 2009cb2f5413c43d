"""`pytest tests/fuzz --fuzz-seconds N`: new random examples for N seconds in place of a few."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from fuzz_targets import Outcome

_RECORD = "--fuzz-record"
_OPTION = "--fuzz-seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, type=float, default=0.0, help="fuzz for so long")
    parser.addoption(_RECORD, type=Path, metavar="FILE", help="add what came of it to FILE")


def _seconds(config: pytest.Config) -> float:
    # Not there where this folder is one among others: then it was not asked for either.
    return float(config.getoption(_OPTION, default=0.0))


def pytest_configure(config: pytest.Config) -> None:
    if _seconds(config):
        hypothesis.settings.register_profile(
            "fuzz",
            deadline=None,
            derandomize=False,
            max_examples=2000,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        hypothesis.settings.load_profile("fuzz")


class Examples:
    """How many examples the tests had, those included that hypothesis makes of a failing one."""

    def __init__(self) -> None:
        self.number = 0

    def count(self, item: pytest.Item) -> None:
        """Counts those of this test from now on, if it is one of hypothesis's."""
        handle: Any = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle is None:
            return
        test: Callable[..., Any] = handle.inner_test

        @functools.wraps(test)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return test(*args, **kwargs)

        handle.inner_test = counted


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests again and again until the time is up."""
    seconds = _seconds(session.config)
    if not seconds:
        return None
    examples = Examples()
    for item in session.items:
        examples.count(item)
    started = time.monotonic()
    deadline = started + seconds
    rounds = 0
    while rounds == 0 or (time.monotonic() < deadline and not session.testsfailed):
        for index, item in enumerate(session.items):
            following = session.items[index + 1] if index + 1 < len(session.items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        rounds += 1
    file = session.config.getoption(_RECORD)
    if file:
        took = time.monotonic() - started
        outcome = Outcome("python", examples.number, session.testsfailed, took)
        outcome.write(file, {"hypothesis": hypothesis.__version__})
    return True
