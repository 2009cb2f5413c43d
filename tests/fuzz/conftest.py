"""`--fuzz-seconds N`: new random examples for N seconds in place of the few repeatable ones."""

from __future__ import annotations

import time

import hypothesis
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", type=float, default=0.0, help="fuzz for so long")


@pytest.fixture(autouse=True, scope="session")
def _profile(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--fuzz-seconds"):
        hypothesis.settings.register_profile(
            "fuzz",
            deadline=None,
            max_examples=2000,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        hypothesis.settings.load_profile("fuzz")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests again and again until the time is up."""
    seconds = session.config.getoption("--fuzz-seconds")
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
