"""`pytest tests/fuzz --fuzz-seconds N`: new random examples for N seconds in place of a few."""

from __future__ import annotations

import time

import hypothesis
import pytest

_OPTION = "--fuzz-seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, type=float, default=0.0, help="fuzz for so long")


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


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests again and again until the time is up."""
    seconds = _seconds(session.config)
    if not seconds:
        return None
    deadline = time.monotonic() + seconds
    rounds = 0
    while rounds == 0 or (time.monotonic() < deadline and not session.testsfailed):
        for index, item in enumerate(session.items):
            following = session.items[index + 1] if index + 1 < len(session.items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        rounds += 1
    return True
